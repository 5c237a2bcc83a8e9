"""What tests of the settings compare."""

from __future__ import annotations

from hostring.group.config import Config


def chosen(config: Config) -> tuple[object, ...]:
    return config.rank, config.world_size, config.topology, config.order, config.transport, config.timeout
