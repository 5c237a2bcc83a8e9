"""Timing: interleaved rounds with the same number of calls on all ranks. Results are checked before and after."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from hostring import Comm
from hostring.bench.cases import ROOTED, Case
from hostring.bench.contenders import Call, Contender, as_numpy
from hostring.bench.truth import Array, count_wrong

MIN_ITERATIONS, MAX_ITERATIONS = 5, 2000  # of one point of one round


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: for one point of one round.
        iterations: calls of one point of one round; `seconds` has no effect when this is given.
        rounds: interleaved; a row's p50 is the median of the rounds' p50.
        warmup: untimed calls before each round's.
        check: compare results.
    """

    seconds: float = 0.1
    iterations: int | None = None
    rounds: int = 3
    warmup: int = 5
    check: bool = True


@dataclass
class Row:
    """One line of the table. Times are those of a call's slowest rank, in seconds.

    Attributes:
        wrong: wrong elements on all ranks together; None when results were not checked.
        rounds: the median of each round.
        ratio: to the p50 of the first contender.
    """

    contender: str
    schedule: str
    case: Case
    iterations: int
    p50: float
    p99: float
    least: float
    wrong: int | None
    rounds: list[float] = field(default_factory=list)
    ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        c = self.case
        return {
            "contender": self.contender,
            "schedule": self.schedule,
            "collective": c.collective,
            "op": c.op,
            "dtype": c.dtype.name,
            "order": c.order,
            "ranks": c.world_size,
            "nbytes": c.nbytes,
            "count": c.n_elements,
            "iterations": self.iterations,
            "p50_us": self.p50 * 1e6,
            "p99_us": self.p99 * 1e6,
            "min_us": self.least * 1e6,
            "rounds_p50_us": [s * 1e6 for s in self.rounds],
            "algbw_GBps": c.algbw(self.p50),
            "busbw_GBps": c.busbw(self.p50),
            "wrong": self.wrong,
            "ratio": self.ratio,
        }


class Session:
    """One rank's side of a benchmark.

    Args:
        comm: carries what the ranks tell each other between measurements.
        contenders: the first one is what the others are compared with.
    """

    def __init__(self, comm: Comm, contenders: Sequence[Contender], effort: Effort) -> None:
        self.comm, self.contenders, self.effort = comm, contenders, effort

    def rows(self, case: Case, progress: Callable[[str], None]) -> Iterator[Row]:
        """Measure one case with all contenders, round by round."""
        x = np.zeros(case.brought, case.dtype)
        calls = [c.bind(case, x) for c in self.contenders]
        wrong = [self.count_wrong(case, c, x, call, seed=1) for c, call in zip(self.contenders, calls, strict=True)]
        x[...] = 0  # repeated sums in place would soon overflow
        counts = [self._iterations(case, call) for call in calls]
        samples: list[list[list[float]]] = [[] for _ in calls]
        for n in range(self.effort.rounds):
            for contender, call, count, rounds in zip(self.contenders, calls, counts, samples, strict=True):
                progress(f"{contender.label}, round {n + 1} of {self.effort.rounds}")
                self._repeat(case, call, min(self.effort.warmup, count))
                rounds.append(self._repeat(case, call, count))
        first = None
        for k, contender in enumerate(self.contenders):
            after = self.count_wrong(case, contender, x, calls[k], seed=2)
            x[...] = 0
            row = self._row(
                case, contender, counts[k], samples[k], None if wrong[k] is None else (wrong[k] or 0) + (after or 0)
            )
            first = row.p50 if first is None else first
            row.ratio = row.p50 / first
            yield row

    def _repeat(self, case: Case, call: Call, count: int) -> list[float]:
        """Time each of `count` calls, back to back. Calls with a root take each rank as root in turn."""
        n, rooted = case.world_size, case.collective in ROOTED
        times = []
        for i in range(count):
            before = perf_counter()
            call(i % n if rooted else 0)
            times.append(perf_counter() - before)
        return times

    def _iterations(self, case: Case, call: Call) -> int:
        """How many calls fit into the time, as measured by rank 0."""
        if self.effort.iterations is not None:
            return self.effort.iterations
        self._repeat(case, call, 1)
        each = max(statistics.median(self._repeat(case, call, 3)), 1e-7)
        agreed = np.array([min(MAX_ITERATIONS, max(MIN_ITERATIONS, self.effort.seconds / each))], np.int64)
        self.comm.broadcast(agreed)
        return int(agreed[0])

    def count_wrong(self, case: Case, contender: Contender, x: Array, call: Call, seed: int) -> int | None:
        """Run the case once for every root on new contributions. Returns the number of wrong elements on all ranks."""
        if not self.effort.check or case.collective == "barrier":
            return None
        rank, wrong = self.comm.rank, 0
        for root in range(case.world_size) if case.collective in ROOTED else (0,):
            x[...] = case.input(rank, seed + root)
            got = as_numpy(call(root), case.dtype)
            expected = case.expected(rank, root, seed + root, contender.wire)
            skipped = (
                not contender.exact and case.collective == "reduce" and rank != root
            )  # gloo leaves partial sums there
            if expected is not None and not skipped:
                wrong += expected.size if got is None else count_wrong(got, expected, contender.exact, case.world_size)
        total = self.comm.all_reduce(np.array([wrong], np.int64))
        return int(total[0])

    def _row(self, case: Case, contender: Contender, count: int, rounds: list[list[float]], wrong: int | None) -> Row:
        """The time of a call is the time on the rank where it took longest."""
        slowest = [self.comm.all_reduce(np.array(times), "max") for times in rounds]
        middles = [float(np.median(times)) for times in slowest]
        every = np.concatenate(slowest)
        p99, least = float(np.quantile(every, 0.99, method="higher")), float(every.min())
        return Row(
            contender.label,
            contender.schedule(case),
            case,
            count,
            statistics.median(middles),
            p99,
            least,
            wrong,
            middles,
        )
