"""Star: rank 0 is the hub, the others are leaves with one link each."""

from __future__ import annotations

from hostring.topologies.collectives import owned
from hostring.topologies.routes import Place
from hostring.topologies.schedule import Schedule

HUB = 0


def neighbours(rank: int, world_size: int) -> set[int]:
    return set(range(world_size)) - {HUB} if rank == HUB else {HUB}


def next_hop(at: int, dst: int, world_size: int) -> int:
    return dst if at == HUB else HUB


def stream(place: Place, n_elements: int, order: str, segment: int) -> Schedule:
    """The hub folds each segment once all contributions to it are there, and sends it out while later ones come in."""
    return owned(place, n_elements, order, segment, [(HUB, 0, n_elements)])
