"""Mesh: every rank has a link to every other."""

from __future__ import annotations

from hostring.topologies.collectives import owned
from hostring.topologies.routes import Place
from hostring.topologies.schedule import Schedule


def neighbours(rank: int, world_size: int) -> set[int]:
    return set(range(world_size)) - {rank}


def next_hop(at: int, dst: int, world_size: int) -> int:
    return dst


def two_shot(place: Place, n_elements: int, order: str, segment: int) -> Schedule:
    """Each rank owns one chunk: it collects it from all, folds it, and sends the result to all.

    Cost: 2(N-1)/N·S bytes sent per rank.
    """
    return owned(place, n_elements, order, segment, [(r, a, b) for r, (a, b) in enumerate(place.chunks(n_elements))])
