"""How the groups inside and between islands are made: all ranks meet first, and tell each other what they are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

import hostring
from hostring.integrations.torch_pg.islands.choice import Choice, resolved, vendor
from hostring.integrations.torch_pg.islands.collectives import Islands
from hostring.integrations.torch_pg.islands.faults import Faults
from hostring.integrations.torch_pg.islands.inside import Inside
from hostring.integrations.torch_pg.islands.lanes import Lanes
from hostring.integrations.torch_pg.islands.layout import Layout, divide
from hostring.integrations.torch_pg.islands.library import DEVICES, CommLibrary, Library, TorchLibrary, open_backend


def find(comm: hostring.Comm, choice: Choice, names: Sequence[int]) -> tuple[Layout, str]:
    """Which ranks form islands, and this rank's library. Two small collectives of `comm`.

    Args:
        names: the ranks' numbers in the whole world, by which `island_size` counts.

    Raises:
        ValueError: two ranks of one island have different libraries.
    """
    mine = resolved(choice).inner
    if choice.island_size is not None:
        key = f"island {names[comm.rank] // choice.island_size}"
    else:
        infos: Any = comm.session.group.peer_infos  # a rank knows itself
        key = f"{infos[comm.rank].host_id} {vendor()}"
    told = [words.decode().split("\0") for words in comm.gather_bytes(f"{key}\0{mine}".encode())]
    library_of: dict[str, tuple[int, str]] = {}
    for rank, (where, library) in enumerate(told):
        first, theirs = library_of.setdefault(where, (rank, library))
        if library != theirs:
            raise ValueError(
                f"ranks {first} and {rank} are in one island, but rank {first} would use {theirs} there, and rank "
                f"{rank} {library}; set inner= to one library, or island_size= so that they are in different islands"
            )
    return divide([where for where, _ in told]), mine


def join(
    comm: hostring.Comm, layout: Layout, library: str, store: Any, timeout: timedelta, options: dict[str, Any],
    *, strict: bool,
) -> Islands:  # fmt: skip
    """The groups of this rank's island and lanes.

    Args:
        options: of the hostring groups: topology, order and so on.
    """
    rank, seconds = comm.rank, timeout.total_seconds()
    island = layout.island_of(rank)
    ranks = layout.islands[island]
    with contextlib.ExitStack() as undo:
        comms = []
        lanes = [lane for lane in layout.lanes if rank in lane.ranks]
        for lane in lanes:
            meeting = c10d.PrefixStore(f"lane {lane.start}/", store)
            place = lane.ranks.index(rank), len(lane.ranks)
            comms.append(undo.enter_context(hostring.init(*place, timeout=seconds, store=meeting, **options)))
        place = ranks.index(rank), len(ranks)
        libraries = _libraries(library, c10d.PrefixStore(f"island {island}/", store), place, timeout, options)
        undo.pop_all()
    between = Lanes(tuple(lanes), tuple(comms))

    def abort(reason: str) -> None:
        between.abort(reason)
        for library in libraries.values():
            library.abort(reason)

    faults = Faults(comm, abort)
    return Islands(comm, layout, Inside(ranks, place[0], libraries, faults), between, faults, strict=strict)


def _libraries(
    name: str, store: Any, place: tuple[int, int], timeout: timedelta, options: dict[str, Any]
) -> dict[str, Library]:
    """By type of device; see `Inside`."""
    if name == "hostring":
        exact = {**options, "wire": "float32"}  # what was asked for is for the way between islands
        return {"cpu": CommLibrary(hostring.init(*place, timeout=timeout.total_seconds(), store=store, **exact))}
    made: dict[str, Library] = {}
    for each in dict.fromkeys((name, "gloo")):  # gloo for tensors on the host
        backend = open_backend(each, c10d.PrefixStore(f"{each}/", store), *place, timeout)
        for device in DEVICES[each]:
            made[device] = TorchLibrary(each, backend, DEVICES[each])
    return made


def untouched(name: str, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """A group of torch's own for ranks that are all in one island: the library, and gloo for tensors on the host."""
    group = c10d.ProcessGroup(store, rank, world_size)
    kinds = c10d.ProcessGroup.BackendType
    group._set_default_backend(getattr(kinds, name.upper()))  # noqa: SLF001 - torch's name for it
    for each in dict.fromkeys((name, "gloo")):
        backend = open_backend(each, c10d.PrefixStore(f"{each}/", store), rank, world_size, timeout)
        backend._set_sequence_number_for_group()  # noqa: SLF001 - torch's name for it
        for device in DEVICES[each]:
            group._register_backend(  # noqa: SLF001 - torch's name for it
                torch.device(device), getattr(kinds, each.upper()), backend
            )
    return group
