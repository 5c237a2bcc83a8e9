"""The topologies and their all-reduce variants.

A new topology is one module and one entry here. `hostring certify` and the tests find it by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hostring.arrays.fold import ORDERS
from hostring.topologies import collectives, dissemination, mesh, ring, star, tree
from hostring.topologies.routes import NextHop, Place
from hostring.topologies.schedule import Schedule

Build = Callable[[Place, int, str, int], Schedule]


@dataclass(frozen=True)
class Variant:
    """An all-reduce schedule. `orders` are the fold orders that it can hold. `code` is its number in frames."""

    code: int
    build: Build
    orders: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """Which ranks are linked, how messages find their way, and how an all-reduce can use these links."""

    name: str
    code: int
    neighbours: Callable[[int, int], set[int]]
    next_hop: NextHop
    variants: dict[str, Variant]

    def place(self, rank: int, world_size: int, unit: int = 1) -> Place:
        return Place(rank, world_size, self.next_hop, unit)

    def variants_for(self, order: str) -> list[str]:
        return [name for name, v in self.variants.items() if order in v.orders]


TOPOLOGIES: Final[dict[str, Topology]] = {
    t.name: t
    for t in (
        Topology(
            "mesh",
            1,
            mesh.neighbours,
            mesh.next_hop,
            {"one_shot": Variant(1, collectives.one_shot, ORDERS), "two_shot": Variant(2, mesh.two_shot, ORDERS)},
        ),
        Topology(
            "ring",
            2,
            ring.neighbours,
            ring.next_hop,
            {
                "relay": Variant(3, collectives.one_shot, ORDERS),
                "chain": Variant(4, ring.chain, ("rank",)),
                "rotate": Variant(5, ring.rotate, ("ring",)),
            },
        ),
        Topology("star", 3, star.neighbours, star.next_hop, {"stream": Variant(6, star.stream, ORDERS)}),
        Topology(
            "tree",
            4,
            tree.neighbours,
            tree.next_hop,
            {"reduce_broadcast": Variant(7, tree.reduce_broadcast, ("tree",))},
        ),
        Topology(
            "dissemination",
            5,
            dissemination.neighbours,
            dissemination.next_hop,
            {"doubling": Variant(8, dissemination.doubling, ORDERS)},
        ),
    )
}


def schedule_name(code: int) -> str:
    """The name of a schedule from its number in frames: "mesh/one_shot"; of another collective's, "mesh"."""
    topology = next((t for t in TOPOLOGIES.values() if t.code == code >> 8), None)
    if topology is None:
        return f"schedule {code}"
    variant = next((name for name, v in topology.variants.items() if v.code == code & 255), None)
    return topology.name if variant is None else f"{topology.name}/{variant}"
