"""Makes "hostring" a backend name of torch.distributed: `dist.init_process_group("hostring")`.

An entry point loads this file at every `import torch`. It imports neither torch nor the rest of hostring until a group
is made. The process group itself is in `torch_pg`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "privateuseone")
"""Device types whose tensors can be copied to the host and back. A renamed privateuseone works too."""


@dataclass
class Options:
    """`pg_options` for `init_process_group` and `new_group`: the choices for this group.

    Attributes:
        topology, order, wire, transport: as in `hostring.init`; None leaves it to the environment.
        inner: the library inside islands: "gloo", "nccl", "xccl", "hostring", "auto" (by the device of each rank), or
            "off". None: HOSTRING_INNER, or for a sub-group what the default group has.
        island_size: so many consecutive ranks of the world form an island. None: HOSTRING_ISLAND_SIZE, or else the
            ranks of one host whose devices are of one vendor.
        strict: hostring folds the contributions of all ranks, so that `order` holds inside islands too. None:
            whether HOSTRING_STRICT is 1.
    """

    topology: str | None = None
    order: str | None = None
    wire: str | None = None
    transport: str | None = None
    inner: str | None = None
    island_size: int | None = None
    strict: bool | None = None


def register() -> None:
    """Tell torch.distributed about the backend. Idempotent; does nothing where torch has no distributed package."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or "HOSTRING" in c10d.Backend._plugins:  # noqa: SLF001 - torch's only list of registered backends
        return
    defaults = dict(c10d.Backend.default_device_backend_map)
    c10d.Backend.register_backend("hostring", _create, extended_api=True, devices=list(DEVICES))
    # registering claims devices that have no default yet, and a vendor's own backend, loaded later, must find them free
    c10d.Backend.default_device_backend_map.clear()
    c10d.Backend.default_device_backend_map.update(defaults)
    c10d.register_rendezvous_handler("hostring", _meet)


def _create(where: Any, options: Any) -> Any:
    from hostring.integrations.torch_pg import create

    return create(where, options)


def _meet(url: str, **options: Any) -> Any:
    from hostring.integrations.torch_pg.rendezvous import meet

    return meet(url, **options)
