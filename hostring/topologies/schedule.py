"""Schedules: what one rank sends, receives and folds, round by round, as data. No I/O, no clock, no state.

Nomenclature: a *chunk* is one rank's share of a buffer, a *segment* is a pipelined piece of a chunk. All positions
and counts are in elements. Buffers have names: `DATA` is the caller's array, `OUT` is the caller's result (for
collectives that don't work in place), any other name is scratch that the engine provides.

A round sends the contents that its buffers had before the round. What a round receives and folds is visible from the
next round on. A message sent in round k is received in round k, and messages between two ranks keep their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from hostring.arrays.fold import Expression

DATA: Final = "data"
OUT: Final = "out"


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `start` to `stop` of a named buffer."""

    buffer: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Send:
    """Send `what` to rank `peer`.

    `raw` marks a contribution before any fold. It may travel in its own 16 bits. `result` marks a result for that rank
    alone. It may travel in the 16-bit dtype of that rank's contribution, to which that rank will round it anyway.
    """

    peer: int
    what: Range
    raw: bool = False
    result: bool = False


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive into `into` from rank `peer`. `raw` and `result` are the same as those of the matching `Send`."""

    peer: int
    into: Range
    raw: bool = False
    result: bool = False


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold the ranges of `sources`, nested pairs in the declared order, into `into`. One lone range is a copy.

    Scratch sources are consumed: the engine accumulates in them. `into` may be one of the sources.
    """

    into: Range
    sources: Expression


@dataclass(frozen=True)
class Round:
    sends: Sequence[Send] = ()
    recvs: Sequence[Recv] = ()
    folds: Sequence[Fold] = ()


@dataclass(frozen=True)
class Schedule:
    """What one rank does in one collective.

    Attributes:
        rounds: in order; a rank may have fewer rounds than another when it has nothing left to do.
        scratch: length in elements of each scratch buffer that the rounds name.
        data: length in elements of `DATA`; `out`: of `OUT`.
    """

    rounds: tuple[Round, ...]
    data: int
    out: int = 0
    scratch: dict[str, int] = field(default_factory=dict)

    def sent_elements(self, raw: bool | None = None) -> int:
        """Elements that this rank sends in all, or only the raw (or not raw) ones."""
        return sum(len(s.what) for r in self.rounds for s in r.sends if raw is None or s.raw == raw)


def split_evenly(n_elements: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Boundaries of `parts` consecutive pieces, whose lengths differ by at most one `unit`. Pieces may be empty."""
    base, extra = divmod(-(-n_elements // unit), parts)
    return list(pairwise(min((i * base + min(i, extra)) * unit, n_elements) for i in range(parts + 1)))


def segments(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    """Consecutive pieces of `start … stop` of at most `length` elements. An empty range is one empty piece."""
    return [(a, min(a + length, stop)) for a in range(start, stop, length)] or [(start, stop)]


def batches(sizes: Sequence[int], small: int, most: int) -> list[list[int]]:
    """Positions in `sizes`, batch by batch. Sizes up to `small` share batches of at most `most`; others are alone."""
    found: list[list[int]] = []
    current: list[int] = []
    held = most + 1
    for k, size in enumerate(sizes):
        if size > small:
            found.append([k])
            continue
        if held + size > most:
            current, held = [], 0
            found.append(current)
        current.append(k)
        held += size
    return found


def offsets(counts: Iterable[int]) -> list[tuple[int, int]]:
    """Boundaries of consecutive pieces of the given lengths."""
    result, at = [], 0
    for count in counts:
        result.append((at, at + count))
        at += count
    return result
