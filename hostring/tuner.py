"""Which schedule for which size. All schedules of one order give the same bits, so this is only about time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .topologies import TOPOLOGIES, Topology, check_order

SEGMENT_NBYTES: Final = 1 << 18  # fits the second-level cache twice, so that it is folded while hot
_ONE_SHOT_NBYTES: Final = 1 << 15
_RELAY_NBYTES: Final = 1 << 14


@dataclass(frozen=True)
class Choice:
    """A topology, one of its all-reduce variants, and the segment length in elements."""

    topology: Topology
    variant: str
    segment: int

    @property
    def code(self) -> int:
        return self.topology.code << 8 | self.topology.variants[self.variant].code


class Tuner:
    """Chooses the same on every rank: only what all ranks know goes in.

    Args:
        topology: "auto" or a name; the links that the group has.
        order: the group's fold order.
    """

    def __init__(self, topology: str, order: str, world_size: int) -> None:
        check_order(topology, order)
        self.topology = TOPOLOGIES["mesh" if topology == "auto" else topology]
        self._order, self._world_size = order, world_size
        self._variants = self.topology.variants_for(order)
        self._forced: Choice | None = None

    def force(self, variant: str, segment: int) -> None:
        """Always choose this, for proofs and measurements. On every rank alike, before its first all-reduce.

        Raises:
            ValueError: the topology has no such variant that holds the order.
        """
        if variant not in self._variants:
            raise ValueError(f"variant={variant!r} of {self.topology.name} can't hold order={self._order!r}; use {' or '.join(self._variants)}")
        self._forced = Choice(self.topology, variant, segment)

    def all_reduce(self, n_elements: int, itemsize: int) -> Choice:
        """The schedule for an all-reduce of `n_elements` of `itemsize` bytes on the wire."""
        if self._forced is not None:
            return self._forced
        nbytes = n_elements * itemsize
        segment = max(1, SEGMENT_NBYTES // itemsize)
        return Choice(self.topology, self._variant(nbytes), segment)

    def _variant(self, nbytes: int) -> str:
        small = {"mesh": "one_shot", "ring": "relay"}.get(self.topology.name)
        if small in self._variants and (nbytes <= (_RELAY_NBYTES if small == "relay" else _ONE_SHOT_NBYTES) or len(self._variants) == 1):
            return small
        return next((v for v in self._variants if v != small), self._variants[0])

    def segment(self, itemsize: int) -> int:
        """The segment length in elements for data that is forwarded or folded on its way."""
        return max(1, SEGMENT_NBYTES // itemsize)
