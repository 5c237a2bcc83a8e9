"""Tunes a group: measures its links, prices every way of doing every collective, and tries the promising ones."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import numpy as np

from hostring.cost import estimate
from hostring.cost.network import Network
from hostring.engine.movements import Movements
from hostring.engine.reductions import Reductions
from hostring.engine.session import Session
from hostring.topologies.rules import TUNED
from hostring.tuning.links import measure
from hostring.tuning.tables import Curve, Tuning

SIZES: Final = tuple(64 << (2 * k) for k in range(10))  # 64 bytes to 16 MiB
TRIED: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce")
_SEGMENTS: Final = (1 << 16, 1 << 18, 1 << 20)
MAX_PREDICTED: Final = 3.0  # what is predicted to take longer than this times the best is not tried
MAX_TRIED: Final = 8
MAX_MEASURED: Final = 1.5  # what has taken longer than this times the best, in two rounds, is not tried again
_ITEMSIZE: Final = 4

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Way:
    """One thing to try."""

    collective: str
    topology: str
    variant: str
    segment_nbytes: int

    def fits(self, nbytes: int, world_size: int) -> bool:
        """Whether the segment length makes a difference at this size."""
        return self.segment_nbytes in (0, _SEGMENTS[0]) or self.segment_nbytes < 2 * nbytes


def tune(
    session: Session,
    *,
    collectives: Sequence[str] = TUNED,
    sizes: Sequence[int] = SIZES,
    measured: bool = True,
    seconds: float = 0.02,
    rounds: int = 5,
    say: Say = lambda what: None,
) -> Tuning:
    """Measure this group. A collective: every rank calls it alike. Nothing is used yet: see `agreement.share`.

    Args:
        measured: try the promising ways; otherwise the links are measured, and the rest is prediction.
        seconds: for one point of one round.

    Returns:
        On rank 0, everything; elsewhere the links alone.
    """
    network = measure(session, say)
    say("prices")
    curves = predict(session, network, collectives, sizes) if session.rank == 0 else []
    source = f"hostring tune of {time.strftime('%Y-%m-%d %H:%M')}" if measured else "links measured at start"
    if measured:
        text = json.dumps(_promising(curves, sizes)) if session.rank == 0 else ""
        plan = json.loads(Movements(session).broadcast_bytes(text.encode(), 0))
        times = {}
        for n, (nbytes, ways) in enumerate(plan):
            say(f"{ways[0][0]} of {nbytes} bytes ({n + 1} of {len(plan)})")
            times.update(_try(session, [_Way(*way) for way in ways], nbytes, seconds, rounds))
        for curve in curves:
            way = _Way(curve.collective, *curve.way, curve.segment_nbytes)
            curve.measured = {nbytes: s for (of, nbytes), s in times.items() if of == way}
    return Tuning(source, network, curves)


def predict(session: Session, network: Network, collectives: Iterable[str], sizes: Sequence[int]) -> list[Curve]:
    """Price everything that the group's rules allow."""
    tuner = session.tuner
    curves = []
    for way in _ways(tuner.allowed, [c for c in collectives if c in TUNED]):
        curve = Curve(way.collective, way.topology, way.variant, way.segment_nbytes)
        for nbytes in (0,) if way.collective == "barrier" else sizes:
            if way.fits(nbytes, session.world_size):
                curve.predicted[nbytes] = _price(way, network, tuner.order, nbytes)
        if curve.predicted:
            curves.append(curve)
    return curves


def _ways(allowed: dict[str, list[tuple[str, str]]], collectives: Sequence[str]) -> list[_Way]:
    found = []
    for collective in collectives:
        for topology, variant in allowed[collective]:
            pipelined = collective == "all_reduce" or (topology != "mesh" and collective != "barrier")
            found += [_Way(collective, topology, variant, s) for s in (_SEGMENTS if pipelined else (0,))]
    return found


def _price(way: _Way, network: Network, order: str, nbytes: int) -> float:
    segment = way.segment_nbytes or 1 << 40
    if way.collective == "all_reduce":
        return estimate.all_reduce(way.topology, way.variant, order, network, nbytes, segment).seconds
    segment = min(segment, max(_ITEMSIZE, nbytes // 16)) if way.topology != "mesh" else segment
    return estimate.movement(way.collective, way.topology, order, network, nbytes, segment).seconds


def _promising(curves: Sequence[Curve], sizes: Sequence[int]) -> list[tuple[int, list[tuple[str, str, str, int]]]]:
    """By size and collective: what is worth trying."""
    plan = []
    for collective in TRIED:
        for nbytes in sizes:
            priced = sorted(
                (c.predicted[nbytes], n)
                for n, c in enumerate(curves)
                if c.collective == collective and nbytes in c.predicted
            )
            close = [curves[n] for cost, n in priced if cost <= MAX_PREDICTED * priced[0][0]][:MAX_TRIED]
            if len(close) > 1:
                plan.append((nbytes, [(c.collective, c.topology, c.variant, c.segment_nbytes) for c in close]))
    return plan


def _try(
    session: Session, ways: Sequence[_Way], nbytes: int, seconds: float, rounds: int
) -> dict[tuple[_Way, int], float]:
    """Seconds of each way: the median of the rounds' medians. Where ranks share cores, the best is mere luck.

    All ranks know the same seconds, so they leave out the same ways.
    """
    x = np.zeros(max(1, nbytes // _ITEMSIZE), np.float32)
    counts: dict[_Way, int] = {}
    samples: dict[_Way, list[float]] = {way: [] for way in ways}
    found: dict[_Way, float] = {}
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
            ways = _hopeful(ways, found)
    session.tuner.release()
    session.planner.drop()
    return {(way, nbytes): taken for way, taken in found.items()}


def _hopeful(ways: Sequence[_Way], found: Mapping[_Way, float]) -> list[_Way]:
    """Those of `ways` that may yet turn out the best of all in `found`."""
    best = min(found.values())
    return [way for way in ways if found[way] <= MAX_MEASURED * best]


def _force(session: Session, way: _Way) -> None:
    session.planner.drop()
    session.tuner.release()
    segment = max(1, way.segment_nbytes // _ITEMSIZE) if way.segment_nbytes else session.tuner.segment(_ITEMSIZE)
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
