"""Which schedule for which size. All schedules of one order give the same bits, so this is only about time.

What a group uses is a table of thresholds by collective, the same on every rank: the one below, or one that rank 0 made
from measurements and handed to all (see `agreement`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from hostring.cost import formulas
from hostring.cost.network import Network, ethernet
from hostring.topologies import TOPOLOGIES, Topology
from hostring.topologies.rules import TUNED, Rules, Way, read_rules

SEGMENT_NBYTES: Final = 1 << 18  # fits the second-level cache twice, so that it is folded while hot
ONE_HOST_SEGMENT_NBYTES: Final = (
    1 << 20
)  # of a mesh on one machine, where a switch between processes costs more than a cache miss
WHOLE: Final = 1 << 62
ONE_HOST_NBYTES: Final = {3: 1 << 17, 4: 1 << 17}  # up to which one round beats two on one machine, by world size
_ONE_HOST_MANY: Final = 1 << 15  # for more ranks
_SMALL: Final = {"mesh": "one_shot", "ring": "relay"}  # the variants with the fewest rounds
_SIZES: Final = tuple(1 << k for k in range(6, 21))


@dataclass(frozen=True)
class Choice:
    """A topology, one of its all-reduce variants ("" for another collective), and the segment length in elements."""

    topology: Topology
    variant: str
    segment: int

    @property
    def code(self) -> int:
        """Its number on the wire: ranks that chose differently must not take each other's messages."""
        return self.topology.code << 8 | (self.topology.variants[self.variant].code if self.variant else 0)

    @property
    def name(self) -> str:
        return f"{self.topology.name}/{self.variant}" if self.variant else self.topology.name


@dataclass(frozen=True)
class Threshold:
    """Up to this many bytes, this. `segment_nbytes` 0 is `Tuner.segment`."""

    upto: int
    topology: str
    variant: str
    segment_nbytes: int = 0


Table = Mapping[str, Sequence[Threshold]]


class Tuner:
    """Chooses the same on every rank: only what all ranks know goes in.

    Args:
        topology: "auto", a name, or rules: see the module `rules`.
        order: the group's fold order.

    Attributes:
        topology: whose links the group has. allowed: what may be used, by collective.
        table: see `Table`. source: where it is from, for people.
        explain: called once per collective and size with what was chosen, where somebody wants to know.
    """

    def __init__(self, topology: str, order: str, world_size: int) -> None:
        self.rules = read_rules(topology, order)
        self.topology = TOPOLOGIES[self.rules.links]
        self.order, self.world_size = order, world_size
        self.allowed: dict[str, list[Way]] = {c: self.rules.allowed(c, order, world_size) for c in TUNED}
        self.table: Table = default_table(self.rules, order, world_size, one_host=True)
        self.source = "defaults"
        self.explain: Callable[[str, int, Choice], None] | None = None
        self._explained: set[tuple[str, int]] = set()
        self._forced: dict[str, tuple[Way, int]] = {}

    def adopt(self, table: Table, source: str) -> None:
        """Use `table` from now on. On every rank alike, while no call is under way, and programs made before must go.

        Raises:
            ValueError: it names what this group may not use.
        """
        for collective, thresholds in table.items():
            for t in thresholds:
                if (t.topology, t.variant) not in self.allowed.get(collective, []):
                    raise ValueError(
                        f"{source}: {t.topology}/{t.variant} is not allowed for {collective} in this group"
                    )
        self.table, self.source = {**self.table, **table}, source

    def force(self, variant: str, segment: int) -> None:
        """Always use this for all-reduces, for proofs and measurements. On every rank alike, before its first all-reduce.

        Args:
            variant: of the group's own topology, or "topology/variant".
            segment: in elements.

        Raises:
            ValueError: no such variant that holds the order, or no links for it.
        """
        topology, _, name = variant.rpartition("/")
        self.force_way("all_reduce", (topology or self.topology.name, name), segment)

    def force_way(self, collective: str, way: Way, segment: int) -> None:
        """The same for any collective."""
        if way not in self.allowed[collective]:
            able = " or ".join("/".join(filter(None, w)) for w in self.allowed[collective])
            raise ValueError(
                f"variant={way[1]!r} of {way[0]} can't hold order={self.order!r} on {self.topology.name} links; use {able}"
            )
        self._forced[collective] = (way, segment)

    def release(self) -> None:
        """Undo `force`."""
        self._forced.clear()

    def all_reduce(self, n_elements: int, itemsize: int) -> Choice:
        """The schedule for an all-reduce of `n_elements` of `itemsize` bytes on the wire."""
        return self.choose("all_reduce", n_elements * itemsize, itemsize)

    def choose(self, collective: str, nbytes: int, itemsize: int) -> Choice:
        """The schedule for any collective.

        Args:
            nbytes: of the buffer of all_reduce, reduce, broadcast, reduce_scatter, scatter and all_to_all; of one rank's
                share of all_gather and gather. Must be the same on every rank.
            itemsize: bytes of one element, the same on every rank.
        """
        if collective in self._forced:
            (topology, variant), segment = self._forced[collective]
            return Choice(TOPOLOGIES[topology], variant, segment)
        threshold = next(t for t in self.table[collective] if nbytes <= t.upto)
        segment = max(1, threshold.segment_nbytes // itemsize) if threshold.segment_nbytes else self.segment(itemsize)
        choice = Choice(TOPOLOGIES[threshold.topology], threshold.variant, segment)
        if self.explain is not None and (collective, nbytes) not in self._explained:
            self._explained.add((collective, nbytes))
            self.explain(collective, nbytes, choice)
        return choice

    def segment(self, itemsize: int) -> int:
        """The segment length in elements for data that is forwarded or folded on its way."""
        return max(1, SEGMENT_NBYTES // itemsize)


def default_table(rules: Rules, order: str, world_size: int, *, one_host: bool) -> Table:
    """What to use as long as nothing was measured: the links' own schedules, fewer rounds for small messages."""
    table: dict[str, list[Threshold]] = {}
    for collective in TUNED:
        ways = rules.allowed(collective, order, world_size)
        topology = ways[0][0]
        variants = [v for t, v in ways if t == topology]
        small = _SMALL.get(topology) if collective == "all_reduce" else None
        large = next((v for v in variants if v != small), variants[0])
        segment = ONE_HOST_SEGMENT_NBYTES if one_host and large == "two_shot" else 0
        table[collective] = [Threshold(WHOLE, topology, large, segment)]
        if small in variants and small != large:
            upto = _few_rounds_nbytes(small, large, world_size, one_host)
            table[collective] = [
                Threshold(upto, topology, small, segment),
                *(table[collective] if upto < WHOLE else []),
            ]
    return table


@lru_cache(maxsize=256)
def _few_rounds_nbytes(small: str, large: str, world_size: int, one_host: bool) -> int:
    """Up to which size the variant with fewer rounds is the quicker one."""
    if (
        world_size == 2
    ):  # both send the same bytes, one shot in one round; and what it folds in 16 bits need not be widened
        return WHOLE
    if one_host:
        return ONE_HOST_NBYTES.get(world_size, _ONE_HOST_MANY)
    network: Network = ethernet(max(2, world_size))

    def cost(variant: str, nbytes: int) -> Any:
        return formulas.all_reduce(variant, network, nbytes, SEGMENT_NBYTES).seconds

    return max((n for n in _SIZES if cost(small, n) <= cost(large, n)), default=0)
