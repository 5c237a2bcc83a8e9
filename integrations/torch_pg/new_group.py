"""How torch gets a process group: c10d calls `create` with a store for the new group."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

import hostring
from hostring.integrations.torch_pg import ddp_verification, torch_versions
from hostring.integrations.torch_pg.async_work import CommWork
from hostring.integrations.torch_pg.islands import choice, setup
from hostring.integrations.torch_pg.islands.choice import Choice
from hostring.integrations.torch_pg.process_group import ProcessGroup

torch_versions.hide_from_compiler(ProcessGroup, CommWork)
ddp_verification.tell_all_ranks()


def create(where: Any, options: Any) -> Any:
    """The creator that is registered with torch.

    Args:
        where: c10d's description of the group: store, rank, size, timeout, and its ranks in the world.
        options: `hostring.integrations.torch_backend.Options`, or None.
    """
    torch_versions.check_map()
    torch_versions.reach_from_cpp()
    names = list(where.global_ranks_in_group)  # empty for the world
    chosen = choice.inherited(options, is_world=not names)
    group = connect(
        where.store,
        where.group_rank,
        where.group_size,
        where.timeout,
        options,
        chosen,
        names or range(where.group_size),
    )
    return torch_versions.present(group, where.timeout) if isinstance(group, ProcessGroup) else group


def connect(
    store: Any, rank: int, world_size: int, timeout: timedelta, options: Any = None, islands: Choice | None = None,
    names: Sequence[int] = (),
) -> Any:  # fmt: skip
    """Meet the other ranks of a group in `store`. Every rank of the group calls it.

    Args:
        islands: what was asked for, if ranks of one vendor are to be joined by its library.
        names: the ranks' numbers in the whole world.

    Returns:
        a `ProcessGroup`; where all ranks are in one island, a group of torch's own over the library alone.
    """
    # a program's first group says at once if links can't be made, and islands need them to form
    later = torch.distributed.is_initialized() and islands is None
    given = {name: getattr(options, name, None) for name in ("topology", "order", "wire", "transport")}
    with contextlib.ExitStack() as undo:
        comm = undo.enter_context(
            hostring.init(rank, world_size, timeout=timeout.total_seconds(), store=store, background=later, **given)
        )
        joined = None
        if islands is not None and world_size > 1:
            layout, library = setup.find(comm, islands, names)
            if len(layout.islands) == 1 and library != "hostring" and not islands.strict:
                return setup.untouched(library, store, rank, world_size, timeout)
            if 1 < len(layout.islands) < world_size:
                joined = setup.join(comm, layout, library, store, timeout, given, strict=islands.strict)
        undo.pop_all()
        return ProcessGroup(comm, store, timeout, connect, islands=joined, choice=islands, names=names)
