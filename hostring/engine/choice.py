"""Which schedule for which size. All schedules of one order give the same bits, so this is only about time.

A group uses one table of thresholds by collective, the same on every rank. Rank 0 makes it when the group starts, from
defaults or from measurements, and gives it to all ranks: see `hostring.tuning.agreement`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hostring.topologies import TOPOLOGIES, Topology
from hostring.topologies.rules import TUNED, Way, read_rules

SEGMENT_NBYTES: Final = 1 << 18  # fits the second-level cache twice, so that it is folded while hot
WHOLE: Final = 1 << 62


@dataclass(frozen=True)
class Choice:
    """A topology, one of its all-reduce variants ("" for another collective), and the segment length in elements."""

    topology: Topology
    variant: str
    segment: int
    code: int = field(
        init=False
    )  # its number in frames: ranks that chose differently must not take each other's messages

    def __post_init__(self) -> None:
        variant = self.topology.variants[self.variant].code if self.variant else 0
        object.__setattr__(self, "code", self.topology.code << 8 | variant)

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
        self.table: Table = links_table(self.allowed)
        self.source = "the links alone"
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
        """Always use this for all-reduces, for proofs and measurements. On every rank alike, before its first call.

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
                f"variant={way[1]!r} of {way[0]} can't hold order={self.order!r} on {self.topology.name} links; "
                f"use {able}"
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
            nbytes: of the buffer of all_reduce, reduce, broadcast, reduce_scatter, scatter and all_to_all; of one
                rank's share of all_gather and gather. Must be the same on every rank.
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
        return SEGMENT_NBYTES // itemsize


def links_table(allowed: Mapping[str, Sequence[Way]]) -> Table:
    """The first way of each collective, for all sizes: what a group uses until its ranks have agreed on a table."""
    return {collective: [Threshold(WHOLE, *ways[0])] for collective, ways in allowed.items()}
