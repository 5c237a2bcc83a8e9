"""Which ranks form an island, and how the data is divided among its ranks and between the islands.

A *lane* is one rank of each island: these ranks exchange the same share of the data. Islands of one size have as many
lanes as ranks, one for each. With islands of several sizes a rank of a smaller island is in several lanes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Lane:
    """One rank of each island, and its share of the data.

    Attributes:
        ranks: in the order of islands.
        start, stop: the share, in units of which a buffer has `Layout.units`.
    """

    ranks: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """All islands of a group.

    Attributes:
        islands: the ranks of each, ascending; islands in the order of their lowest ranks.
        units: a buffer is divided into so many equal units; each rank of an island has as many of them as the others.
        lanes: in the order of their shares.
    """

    islands: tuple[tuple[int, ...], ...]
    units: int
    lanes: tuple[Lane, ...]

    @property
    def even(self) -> bool:
        """Whether all islands have equally many ranks."""
        return len({len(ranks) for ranks in self.islands}) == 1

    def island_of(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self.islands) if rank in ranks)

    def by_member(self) -> list[int]:
        """For even islands: all ranks, the first of each island first, then the second of each, and so on."""
        return [ranks[member] for member in range(len(self.islands[0])) for ranks in self.islands]


def divide(keys: Sequence[Hashable]) -> Layout:
    """Ranks with equal `keys` form an island."""
    by_key: dict[Hashable, list[int]] = {}
    for rank, key in enumerate(keys):
        by_key.setdefault(key, []).append(rank)
    islands = tuple(tuple(ranks) for ranks in by_key.values())  # a dict keeps the order of the lowest ranks
    units = math.lcm(*(len(ranks) for ranks in islands))
    bounds = sorted({member * units // len(ranks) for ranks in islands for member in range(len(ranks) + 1)})
    lanes = tuple(
        Lane(tuple(ranks[start * len(ranks) // units] for ranks in islands), start, stop)
        for start, stop in pairwise(bounds)
    )
    return Layout(islands, units, lanes)
