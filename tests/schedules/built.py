"""The schedules of all ranks of one all-reduce."""

from __future__ import annotations

from hostring.topologies import TOPOLOGIES
from hostring.topologies.schedule import Schedule

SEGMENT = 4


def schedules(
    topology: str, variant: str, order: str, world_size: int, n_elements: int, segment: int = SEGMENT
) -> list[Schedule]:
    t = TOPOLOGIES[topology]
    return [
        t.variants[variant].build(t.place(rank, world_size), n_elements, order, segment) for rank in range(world_size)
    ]
