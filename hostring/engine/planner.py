"""From a call to its program: schedules are chosen, bound and kept, and scratch memory is shared by all of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from hostring.arrays.dtypes import (
    CODES,
    COMPLEX_KIND,
    FLOAT32,
    FLOAT_KIND,
    WIRE_DTYPES,
    DType,
    kind_code,
    unit_of,
)
from hostring.arrays.fold import fold_functions, sixteen_bit_sum
from hostring.engine.binding import SideMemory
from hostring.engine.choice import Choice, Tuner
from hostring.engine.counters import Counters
from hostring.engine.frames import Call
from hostring.engine.program import Program, scratch_layout
from hostring.engine.receiving import Pipe
from hostring.topologies import TOPOLOGIES, collectives
from hostring.topologies.routes import Place
from hostring.topologies.schedule import Schedule

_NOMINAL: Final = {
    FLOAT_KIND: 4,
    COMPLEX_KIND: 8,
}  # bytes of a float and of a complex number, whose width each rank may choose for itself
SMALL_NBYTES: Final = 1 << 20  # up to this size, slots for whole segments take little memory
MIN_SLOT_NBYTES: Final = 1 << 12
_IN_SLOTS: Final = ("one_shot", "relay", "stream", "")  # "": a collective that is no all-reduce
MAX_PROGRAMS: Final = 512  # more shapes than a decode or training loop has; beyond, all are dropped and made again


class Planner:
    """Makes and keeps the programs of one group.

    Scratch is one block, as large as the largest program needs. When it grows, the programs over the old block are
    dropped. The same holds for the block for payloads of other dtypes.

    Args:
        wire: what float32 contributions are rounded to.
    """

    def __init__(
        self, rank: int, world_size: int, tuner: Tuner, order: str, epoch: int, pipes: Mapping[int, Pipe],
        counters: Counters, wire: str,
    ) -> None:  # fmt: skip
        self._place = Place(rank, world_size, tuner.topology.next_hop)
        self._tuner, self._order, self._epoch, self._pipes, self._counters = tuner, order, epoch, pipes, counters
        # By (n_elements, dtype that is folded, op, detail or None[, raw dtype]); other collectives' begin with a name.
        self.programs: dict[Any, Program] = {}
        self._float32_only: set[Any] = set()  # of the same keys: what can't be folded in 16 bits
        self._scratch = bytearray()
        self._sides = SideMemory()
        self._results = SideMemory() if wire == "float32" else None
        self._unit = unit_of(wire)  # elements of a contribution that are rounded together

    @property
    def memory_held(self) -> int:
        """Bytes of scratch, of payloads of other dtypes, and of rounded results."""
        kept = [self._scratch, self._sides.block, *([] if self._results is None else [self._results.block])]
        return sum(map(len, kept))

    def all_reduce(
        self, n_elements: int, dtype: DType, op: str, raw: DType | None, detail: int | None = None
    ) -> Program:
        """An all-reduce that folds `dtype`.

        Args:
            raw: the narrower dtype in which contributions travel, or None. detail: see `Call`.
        """
        key = (n_elements, dtype, op, detail) if raw is None else (n_elements, dtype, op, detail, raw)
        return self.programs.get(key) or self._keep(
            key, lambda: self._all_reduce(n_elements, dtype, dtype, op, raw, detail)
        )

    def _all_reduce(
        self, n_elements: int, dtype: DType, wire: DType, op: str, raw: DType | None, detail: int | None
    ) -> Program:
        choice = self._tuner.choose("all_reduce", n_elements * wire.itemsize, wire.itemsize)
        schedule = self._build(choice, n_elements, wire)
        call = Call("all_reduce", op, CODES[wire], self._order, n_elements, detail or 0, choice.code, self._epoch)
        return self._bind(schedule, call, dtype, raw)

    def unstaged(self, n_elements: int, dtype: DType, op: str, detail: int | None) -> Program | None:
        """An all-reduce that works in the caller's own memory, of `dtype`; None where contributions must be staged."""
        wire = WIRE_DTYPES[dtype]
        return (
            self.all_reduce(n_elements, wire, op, None, detail)
            if wire == dtype
            else self.sixteen_bit(n_elements, dtype, op, detail)
        )

    def sixteen_bit(self, n_elements: int, dtype: DType, op: str, detail: int | None) -> Program | None:
        """An all-reduce that folds 16-bit contributions as they are, or None where that can't give the bits of float32.

        It can for a sum of two contributions: float32 holds enough bits of it that rounding twice is rounding once
        (Figueroa, When is double rounding innocuous?, SIGNUM Newsletter 30(3), 1995).
        """
        if self._place.world_size != 2 or op != "sum" or sixteen_bit_sum(dtype, n_elements) is None:
            return None
        key = (n_elements, dtype, op, detail)
        known = self.programs.get(key)
        if known is not None or key in self._float32_only:
            return known
        schedule = self.all_reduce_schedule(n_elements, FLOAT32)
        if schedule.sent_elements(raw=False) or not all(
            recv.raw for round_ in schedule.rounds for recv in round_.recvs
        ):
            self._float32_only.add(key)
            return None
        return self._keep(key, lambda: self._all_reduce(n_elements, dtype, FLOAT32, op, None, detail))

    def reduction(
        self, collective: str, n_elements: int, dtype: DType, op: str, raw: DType | None, detail: Any,
        part_of: tuple[str, int] | None = None,
    ) -> Program:  # fmt: skip
        """A "reduce" to root `detail`, or a "reduce_scatter" into chunks of `detail` elements.

        Args:
            part_of: the collective that this is a part of, which frames name, and what else all ranks must agree on.
        """
        key = (collective, n_elements, dtype, op, raw, detail)
        return self._cached(
            key if part_of is None else (*key, part_of),
            lambda: self._reduction(collective, n_elements, dtype, op, raw, detail, *(part_of or (collective, 0))),
        )

    def _reduction(
        self, collective: str, n_elements: int, dtype: DType, op: str, raw: DType | None, detail: Any, name: str,
        agreed: int,
    ) -> Program:  # fmt: skip
        schedule = self.schedule(collective, n_elements, detail, dtype)
        code = self._choose(collective, n_elements, detail, dtype).code
        common = _detail(collective, detail) ^ agreed
        call = Call(name, op, CODES[dtype], self._order, n_elements, common, code, self._epoch)
        return self._bind(schedule, call, dtype, raw)

    def movement(
        self, collective: str, n_elements: int, dtype: DType, detail: Any, name: str | None = None, first_round: int = 0
    ) -> Program:
        """Data that only moves. `detail` is the root, the counts, or both. `name` is what the frames call it."""
        key = (collective, n_elements, dtype, detail, name)
        return self._cached(
            key, lambda: self._movement(collective, n_elements, dtype, detail, name or collective, first_round)
        )

    def _movement(
        self, collective: str, n_elements: int, dtype: DType, detail: Any, name: str, first_round: int
    ) -> Program:
        schedule = self.schedule(collective, n_elements, detail, dtype)
        code = self._choose(collective, n_elements, detail, dtype).code
        call = Call(
            name, None, kind_code(dtype), self._order, n_elements, _detail(collective, detail), code, self._epoch
        )
        return self._bind(schedule, call, dtype, None, first_round)

    def schedule(self, collective: str, n_elements: int, detail: Any, dtype: DType) -> Schedule:
        """What this rank does in `collective`."""
        choice, order = self._choose(collective, n_elements, detail, dtype), self._order
        place = self._placed(choice, dtype)
        if collective in collectives.FOLDING:
            segment = _folding(choice, collective, n_elements, dtype.itemsize, place, order)
        else:
            extent = _extent(collective, n_elements, detail)
            segment = _moving(choice, collective, extent, _nominal(dtype), place.world_size)
        return collectives.schedule_of(collective, place, n_elements, detail, order, segment)

    def _choose(self, collective: str, n_elements: int, detail: Any, dtype: DType) -> Choice:
        """The same on all ranks: only counts that all know go in, not the width of a dtype, which may differ."""
        itemsize = _nominal(dtype)
        return self._tuner.choose(collective, _extent(collective, n_elements, detail) * itemsize, itemsize)

    def _placed(self, choice: Choice, dtype: DType) -> Place:
        unit = self._unit if dtype == FLOAT32 else 1
        return Place(self._place.rank, self._place.world_size, choice.topology.next_hop, unit)

    def _build(self, choice: Choice, n_elements: int, wire: DType) -> Schedule:
        place = self._placed(choice, wire)
        segment = _folding(choice, "all_reduce", n_elements, wire.itemsize, place, self._order)
        return choice.topology.variants[choice.variant].build(place, n_elements, self._order, segment)

    def all_reduce_schedule(self, n_elements: int, wire: DType) -> Schedule:
        return self._build(self._tuner.all_reduce(n_elements, wire.itemsize), n_elements, wire)

    def _cached(self, key: Any, make: Callable[[], Program]) -> Program:
        return self.programs.get(key) or self._keep(key, make)

    def _keep(self, key: Any, make: Callable[[], Program]) -> Program:
        if len(self.programs) >= MAX_PROGRAMS:
            self._drop()
        program = self.programs[key] = make()
        self._counters.programs.add(program)
        return program

    def _bind(self, schedule: Schedule, call: Call, dtype: DType, raw: DType | None, first_round: int = 0) -> Program:
        needed = scratch_layout(schedule.scratch, dtype.itemsize)[1]
        if needed > len(self._scratch):
            if self._scratch:  # programs that were made before there was any use none
                self._drop()
            self._scratch = bytearray(needed)
        folds = None if call.op is None else fold_functions(call.op, dtype)
        sides = self._sides.block
        results = None if call.op == "avg" else self._results  # an average is divided before it is rounded
        program = Program(
            schedule, call, dtype, folds, self._pipes, self._scratch, self._sides, results, raw, first_round
        )
        if self._sides.block is not sides:
            self._drop()
        return program

    def probe(self, schedule: Schedule, number: int, dtype: DType = FLOAT32) -> Program:
        """A program for a schedule of hostring's own, such as a measurement's. It is not kept, and not counted.

        Args:
            number: the same on all ranks, and of no other probe.
        """
        kind = FLOAT_KIND if dtype == FLOAT32 else CODES[dtype]
        call = Call("all_to_all", None, kind, self._order, schedule.data, number, epoch=self._epoch)
        return self._bind(schedule, call, dtype, None)

    def drop(self) -> None:
        """Forget all programs: the next call of each shape asks the tuner again. On every rank alike."""
        self._drop()

    def _drop(self) -> None:
        self._counters.harvest()
        self._counters.programs.clear()
        self.programs.clear()
        self._float32_only.clear()


def _extent(collective: str, n_elements: int, detail: Any) -> int:
    """Elements of the buffer, or of the largest share: known to every rank, also where the shares are uneven."""
    if collective == "all_to_all":
        return max(map(sum, detail))
    if collective in ("all_gather", "gather"):
        return int(max(detail if collective == "all_gather" else detail[1]))
    return n_elements


@lru_cache(maxsize=64)
def _longest_way(topology: str, world_size: int) -> int:
    place = TOPOLOGIES[topology].place(0, world_size)
    return max((len(place.path(src, dst)) - 1 for src in range(world_size) for dst in range(world_size)), default=0)


def _folding(choice: Choice, collective: str, n_elements: int, itemsize: int, place: Place, order: str) -> int:
    """The segment length for data that is folded: shorter than chosen where all contributions lie in slots at one rank.

    Above 1 MB these slots take about as much memory as the buffer, and half as much again while 16-bit payloads are
    widened. Only what all ranks know goes in, so that they cut alike.
    """
    nbytes, segment = n_elements * itemsize, choice.segment
    if nbytes > SMALL_NBYTES and choice.variant in _IN_SLOTS:
        hops = _longest_way(choice.topology.name, place.world_size)
        parts = place.world_size if order == "ring" or (collective == "reduce_scatter" and hops > 1) else 1
        slot = nbytes // (parts * (place.world_size - 1) * (hops + 1))
        segment = min(segment, max(slot, MIN_SLOT_NBYTES) // itemsize)
    return max(segment - segment % place.unit, place.unit)


def _moving(choice: Choice, collective: str, n_elements: int, itemsize: int, world_size: int) -> int:
    """The segment length for data that only moves: whole on a mesh; elsewhere short, because ranks hold it."""
    if choice.topology.name == "mesh":
        return collectives.WHOLE
    passing = max(16, world_size**2 if collective == "all_to_all" else 0)  # each of N² parts has two slots at a hub
    return min(choice.segment, max(MIN_SLOT_NBYTES // itemsize, n_elements // passing))


def _nominal(dtype: DType) -> int:
    """Bytes of an element as all ranks count them, though their float dtypes may differ in width."""
    return _NOMINAL.get(kind_code(dtype), dtype.itemsize)


def _detail(collective: str, detail: Any) -> int:
    """What all ranks must agree on besides the count: the root, or a checksum of the counts."""
    if isinstance(detail, int):
        return detail
    if isinstance(detail, tuple) and detail and isinstance(detail[0], int) and collective in ("gather", "scatter"):
        return detail[0]
    return zlib.crc32(repr(detail).encode())
