"""Star: rank 0 is the hub, the others are leaves with one link each."""

from __future__ import annotations

from ..schedule import Schedule
from .collectives import owned
from .graph import Place

HUB = 0


def neighbours(rank: int, world_size: int) -> set[int]:
    return set(range(world_size)) - {HUB} if rank == HUB else {HUB}


def next_hop(at: int, dst: int, world_size: int) -> int:
    return dst if at == HUB else HUB


def stream(place: Place, n_elements: int, order: str, segment: int) -> Schedule:
    """The hub folds in the declared order as the prefix arrives, and sends a segment out while later ones come in."""
    return owned(place, n_elements, order, segment, [(HUB, 0, n_elements)])
