"""How torch gets a process group: c10d calls `create` with a store for the new group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import hostring
from hostring.integrations.torch_pg import ddp_verification, torch_versions
from hostring.integrations.torch_pg.async_work import CommWork
from hostring.integrations.torch_pg.process_group import ProcessGroup

torch_versions.hide_from_compiler(ProcessGroup, CommWork)
ddp_verification.tell_all_ranks()


def create(where: Any, options: Any) -> Any:
    """The creator that is registered with torch.

    Args:
        where: c10d's description of the group: store, rank, size, timeout.
        options: `hostring.integrations.torch_backend.Options`, or None.
    """
    torch_versions.check_map()
    torch_versions.reach_from_cpp()
    group = connect(where.store, where.group_rank, where.group_size, where.timeout, options)
    return torch_versions.present(group, where.timeout)


def connect(store: Any, rank: int, world_size: int, timeout: timedelta, options: Any = None) -> ProcessGroup:
    """Meet the other ranks of a group in `store`, and make links. Every rank of the group calls it."""
    comm = hostring.init(
        rank,
        world_size,
        topology=getattr(options, "topology", None),
        order=getattr(options, "order", None),
        wire=getattr(options, "wire", None),
        transport=getattr(options, "transport", None),
        timeout=timeout.total_seconds(),
        store=store,
    )
    return ProcessGroup(comm, store, timeout, connect)
