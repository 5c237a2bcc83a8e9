"""What the user allows the tuner: `topology="…"` and HOSTRING_TOPOLOGY, a plain name or rules as in NCCL.

mesh                                  these links, and their schedules for everything
all_reduce:mesh;broadcast:star        for these collectives only these schedules; the rest is left to the tuner
all_reduce:mesh/two_shot              one variant
all_reduce:^star,tree                 everything but
ring;all_reduce:ring/relay            links and rules together
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from hostring.arrays.fold import ORDERS
from hostring.topologies import TOPOLOGIES

TUNED: Final = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
"""The collectives that have a choice. `decide` goes as a gather and a broadcast."""

Way = tuple[str, str]  # (topology, variant); the variant is "" for all but all_reduce


@dataclass(frozen=True)
class Rules:
    """What one group may use.

    Attributes:
        links: the topology whose links the group has.
        named: the user named it, so that nothing else is used unless a rule says so.
        ways: by collective that has a rule, what it leaves.
    """

    links: str = "mesh"
    named: bool = False
    ways: Mapping[str, tuple[Way, ...]] = field(default_factory=dict)

    def allowed(self, collective: str, order: str, world_size: int) -> list[Way]:
        """What may carry out `collective` on the group's links, the links' own schedules first. Never empty.

        Raises:
            ValueError: a rule leaves only what the group's links can't do.
        """
        own = [way for way in _all_ways(collective, order) if way[0] == self.links]
        others: Sequence[Way] = () if self.named else _all_ways(collective, order)
        if collective in self.ways:
            own, others = [], self.ways[collective]
        found = own + [way for way in others if way not in own and _has_links(self.links, way[0], world_size)]
        if not found:
            wanted = ", ".join(sorted({t for t, _ in others}))
            raise ValueError(
                f"topology: the rule for {collective} asks for {wanted}, "
                f"whose links a {self.links} of {world_size} ranks doesn't have; "
                f"use mesh links, or {self.links} for {collective}"
            )
        return found


@lru_cache(maxsize=64)
def read_rules(text: str, order: str) -> Rules:
    """Read a topology string.

    Raises:
        ValueError: an unknown name, a repeated rule, or a topology that can't hold the order; it names those that can.
    """
    links, ways = "", {}
    for item in filter(None, (part.strip() for part in text.lower().split(";"))):
        collective, colon, choice = (part.strip() for part in item.partition(":"))
        if not colon:
            check_order(item, order)
            if links:
                raise ValueError(f"topology={text!r} names the group's links twice, {links} and {item}")
            links = item
        elif collective in ways:
            raise ValueError(f"topology={text!r} has two rules for {collective}")
        else:
            ways[collective] = _read_choice(collective, choice, order, text)
    check_order(links or "auto", order)
    plain = links in ("", "auto")
    return Rules("mesh" if plain else links, not plain, ways)


def check_order(topology: str, order: str) -> None:
    """Refuse a pair that can't hold, naming what can.

    Raises:
        ValueError: unknown name, or no variant of `topology` folds in `order`.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; use one of {', '.join(ORDERS)}")
    if topology == "auto":
        return
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology={topology!r} is unknown; use auto or one of {', '.join(TOPOLOGIES)}")
    if not TOPOLOGIES[topology].variants_for(order):
        able = [name for name, t in TOPOLOGIES.items() if t.variants_for(order)]
        held = [o for o in ORDERS if TOPOLOGIES[topology].variants_for(o)]
        raise ValueError(
            f"order={order!r} can't be held by topology={topology!r}; "
            f"use order={' or '.join(map(repr, held))}, or topology {', '.join(able)}"
        )


def _read_choice(collective: str, choice: str, order: str, text: str) -> tuple[Way, ...]:
    if collective not in TUNED:
        raise ValueError(
            f"topology={text!r}: {collective!r} has no schedules to choose from; use one of {', '.join(TUNED)}"
        )
    excluded = choice.startswith("^")
    named = [way for name in choice.lstrip("^").split(",") for way in _ways(collective, name.strip(), order, text)]
    if not excluded:
        return tuple(dict.fromkeys(named))
    left = tuple(way for way in _all_ways(collective, order) if way not in named)
    if not left:
        raise ValueError(f"topology={text!r} excludes everything that can do {collective} with order={order!r}")
    return left


def _ways(collective: str, name: str, order: str, text: str) -> list[Way]:
    topology, slash, variant = name.partition("/")
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology={text!r}: {topology!r} is unknown; use one of {', '.join(TOPOLOGIES)}")
    possible = [way for way in _all_ways(collective, order) if way[0] == topology]
    if collective == "all_reduce" and not possible:
        check_order(topology, order)  # says what can hold it
    found = [way for way in possible if not slash or way[1] == variant]
    if not found:
        able = ", ".join(f"{t}/{v}" if v else t for t, v in possible)
        raise ValueError(f"topology={text!r}: {name} can't do {collective} with order={order!r}; use {able}")
    return found


def _all_ways(collective: str, order: str) -> list[Way]:
    if collective != "all_reduce":
        return [(name, "") for name in TOPOLOGIES]
    return [(t.name, variant) for t in TOPOLOGIES.values() for variant, v in t.variants.items() if order in v.orders]


def _has_links(links: str, topology: str, world_size: int) -> bool:
    if links in ("mesh", topology):
        return True
    there, needed = TOPOLOGIES[links].neighbours, TOPOLOGIES[topology].neighbours
    return all(needed(rank, world_size) <= there(rank, world_size) for rank in range(world_size))
