"""A decode loop without a model: two all-reduces of one hidden state per layer, each after a pause for computing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from hostring import Comm
from hostring.bench.cases import Case, case
from hostring.bench.contenders import Call, Contender
from hostring.bench.measure import Session
from hostring.bench.truth import Array
from hostring.engine.counters import blamed


@dataclass(frozen=True)
class Loop:
    """What one token costs the ranks: `layers` times (gap, all-reduce, gap, all-reduce)."""

    layers: int
    hidden: int
    gap: float
    tokens: int

    @classmethod
    def parse(cls, text: str, gap_us: float, tokens: int) -> Loop:
        """From "LAYERS,HIDDEN".

        Raises:
            ValueError: not two whole numbers above 0.
        """
        try:
            layers, hidden = (int(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"--decode-loop {text!r}: expected LAYERS,HIDDEN, such as 30,576") from None
        if layers < 1 or hidden < 1 or tokens < 1 or gap_us < 0:
            raise ValueError(f"--decode-loop {text!r}, --tokens {tokens}, --gap-us {gap_us:g}: must be positive")
        return cls(layers, hidden, gap_us * 1e-6, tokens)


@dataclass
class LoopRow:
    """Times are seconds: per token, of the slowest rank; per all-reduce, over all ranks."""

    contender: str
    schedule: str
    case: Case
    loop: Loop
    token_p50: float
    token_p99: float
    token_least: float
    call_p50: float
    call_p99: float
    collective_fraction: float
    waited_for: dict[int, float]
    wrong: int | None
    ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "contender": self.contender,
            "schedule": self.schedule,
            "collective": "decode_loop",
            "dtype": self.case.dtype.name,
            "order": self.case.order,
            "ranks": self.case.world_size,
            "layers": self.loop.layers,
            "hidden": self.loop.hidden,
            "nbytes": self.case.nbytes,
            "gap_us": self.loop.gap * 1e6,
            "tokens": self.loop.tokens,
            "token_p50_us": self.token_p50 * 1e6,
            "token_p99_us": self.token_p99 * 1e6,
            "token_min_us": self.token_least * 1e6,
            "tokens_per_s": 1 / self.token_p50,
            "call_p50_us": self.call_p50 * 1e6,
            "call_p99_us": self.call_p99 * 1e6,
            "collective_fraction": self.collective_fraction,
            "waited_for_s": self.waited_for,
            "wrong": self.wrong,
            "ratio": self.ratio,
        }


def decode_loop(
    session: Session, loop: Loop, dtype: np.dtype[Any], order: str, progress: Callable[[str], None]
) -> Iterator[LoopRow]:
    """Run the loop with all contenders in interleaved rounds."""
    comm, effort = session.comm, session.effort
    wanted = case("all_reduce", "sum", dtype, loop.hidden * dtype.itemsize, comm.world_size, order)
    x = np.zeros(wanted.brought, dtype)
    calls = [c.bind(wanted, x) for c in session.contenders]
    wrong = [session.count_wrong(wanted, c, x, call, 1) for c, call in zip(session.contenders, calls, strict=True)]
    x[...] = 0
    waited: list[dict[int, float]] = [{} for _ in calls]
    tokens: list[list[float]] = [[] for _ in calls]
    times: list[list[float]] = [[] for _ in calls]
    for n in range(effort.rounds):
        for k, contender in enumerate(session.contenders):
            progress(f"{contender.label}, round {n + 1} of {effort.rounds}")
            _tokens(calls[k], loop, 1)
            before = contender.waited_for()
            took, spent = _tokens(calls[k], loop, loop.tokens)
            tokens[k] += took
            times[k] += spent
            for peer, seconds in contender.waited_for().items():
                waited[k][peer] = waited[k].get(peer, 0.0) + seconds - before.get(peer, 0.0)
    first = None
    for k, contender in enumerate(session.contenders):
        row = _row(comm, contender, wanted, loop, np.array(tokens[k]), np.array(times[k]), waited[k], wrong[k])
        first = row.token_p50 if first is None else first
        row.ratio = row.token_p50 / first
        yield row


def _tokens(call: Call, loop: Loop, count: int) -> tuple[list[float], list[float]]:
    """Seconds of each token, and of each all-reduce."""
    tokens, calls = [], []
    for _ in range(count):
        began = perf_counter()
        for _ in range(2 * loop.layers):
            until = perf_counter() + loop.gap
            while perf_counter() < until:
                pass
            before = perf_counter()
            call(0)
            calls.append(perf_counter() - before)
        tokens.append(perf_counter() - began)
    return tokens, calls


def _row(
    comm: Comm,
    contender: Contender,
    wanted: Case,
    loop: Loop,
    tokens: Array,
    calls: Array,
    waited: dict[int, float],
    wrong: int | None,
) -> LoopRow:
    waiting = np.zeros(comm.world_size)
    for peer, seconds in waited.items():
        waiting[peer] = seconds
    waiting = blamed(comm.all_gather(waiting))
    mine = np.array([statistics.median(tokens), np.quantile(tokens, 0.99), tokens.min()])
    middle, late, least = comm.all_reduce(mine, "max").tolist()
    every = comm.all_gather(calls).reshape(-1)
    fraction = float(calls.sum() / tokens.sum())
    mean = comm.all_reduce(np.array([fraction]), "avg")
    total = {rank: float(s) for rank, s in enumerate(waiting) if s}
    p50, p99 = (float(np.quantile(every, q)) for q in (0.5, 0.99))
    schedule = contender.schedule(wanted)
    return LoopRow(contender.label, schedule, wanted, loop, middle, late, least, p50, p99, float(mean[0]), total, wrong)
