"""Times ways of doing a collective, in interleaved rounds, on the slowest rank of each call."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import numpy as np

from hostring.engine.movements import Movements
from hostring.engine.reductions import Reductions
from hostring.engine.session import Session

SEGMENTS: Final = (1 << 16, 1 << 18, 1 << 20)
ITEMSIZE: Final = 4
MAX_MEASURED: Final = 1.5  # what has taken longer than this times the best, in two rounds, is not tried again


@dataclass(frozen=True)
class Way:
    """One thing to try."""

    collective: str
    topology: str
    variant: str
    segment_nbytes: int

    def fits(self, nbytes: int, world_size: int) -> bool:
        """Whether the segment length makes a difference at this size."""
        return self.segment_nbytes in (0, SEGMENTS[0]) or self.segment_nbytes < 2 * nbytes


def time_ways(
    session: Session, ways: Sequence[Way], nbytes: int, seconds: float, rounds: int
) -> dict[tuple[Way, int], float]:
    """Seconds of each way: the median of the rounds' medians. Where ranks share cores, the best is mere luck.

    All ranks know the same seconds, so they leave out the same ways.
    """
    x = np.zeros(max(1, nbytes // ITEMSIZE), np.float32)
    counts: dict[Way, int] = {}
    samples: dict[Way, list[float]] = {way: [] for way in ways}
    found: dict[Way, float] = {}
    for n in range(rounds):
        for way in ways:
            _force(session, way)
            call = _call(session, way.collective, x)
            call(0)
            if way not in counts:
                counts[way] = _agreed_count(session, call, seconds)
            samples[way].append(_median(session, call, counts[way]))
        found |= {way: statistics.median(samples[way]) for way in ways}
        if n > 0:  # one round may have been bad luck
            ways = hopeful(ways, found)
    session.tuner.release()
    session.planner.drop()
    return {(way, nbytes): taken for way, taken in found.items()}


def hopeful(ways: Sequence[Way], found: Mapping[Way, float]) -> list[Way]:
    """Those of `ways` that may yet turn out the best of all in `found`."""
    best = min(found.values())
    return [way for way in ways if found[way] <= MAX_MEASURED * best]


def _force(session: Session, way: Way) -> None:
    session.planner.drop()
    session.tuner.release()
    segment = max(1, way.segment_nbytes // ITEMSIZE) if way.segment_nbytes else session.tuner.segment(ITEMSIZE)
    session.tuner.force_way(way.collective, (way.topology, way.variant), segment)


def _agreed_count(session: Session, call: Callable[[int], Any], seconds: float) -> int:
    began = perf_counter()
    call(0)
    count = np.array([min(500, max(2, seconds / max(perf_counter() - began, 1e-7)))], np.int64)
    agreed = Movements(session).decide(count, lambda all_of_them: all_of_them[0], 0)
    return int(agreed[0])


def _median(session: Session, call: Callable[[int], Any], count: int) -> float:
    """Of seconds of a call, which has taken as long as on the rank where it took longest."""
    times = []
    for i in range(count):
        began = perf_counter()
        call(i)
        times.append(perf_counter() - began)
    return float(np.median(Reductions(session).all_reduce(np.array(times), "max", None)))


def _call(session: Session, collective: str, x: Any) -> Callable[[int], Any]:
    n, reductions, movements = session.world_size, Reductions(session), Movements(session)
    if collective == "reduce_scatter":
        rows = x[: x.size // n * n].reshape(n, -1) if x.size >= n else np.zeros((n, 1), np.float32)
        return lambda i: reductions.reduce_scatter(rows, "sum", None, None, None)
    calls: dict[str, Callable[[int], Any]] = {
        "all_reduce": lambda i: reductions.all_reduce(x, "sum", None),
        "broadcast": lambda i: movements.broadcast(x, i % n),
        "reduce": lambda i: reductions.reduce(x, i % n, "sum", None),
        "all_gather": lambda i: movements.all_gather(x),
    }
    return calls[collective]
