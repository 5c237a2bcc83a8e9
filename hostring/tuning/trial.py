"""Tunes a group: measures its links, prices every way of doing every collective, and tries the promising ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from hostring.cost import estimate
from hostring.cost.network import Network
from hostring.engine.movements import Movements
from hostring.engine.session import Session
from hostring.topologies.rules import TUNED
from hostring.tuning.links import measure
from hostring.tuning.tables import Curve, Tuning
from hostring.tuning.timing import ITEMSIZE, SEGMENTS, Way, time_ways

SIZES: Final = tuple(64 << (2 * k) for k in range(10))  # 64 bytes to 16 MiB
TRIED: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce")
MAX_PREDICTED: Final = 3.0  # what is predicted to take longer than this times the best is not tried
MAX_TRIED: Final = 8

Say = Callable[[str], None]


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
            times.update(time_ways(session, [Way(*way) for way in ways], nbytes, seconds, rounds))
        for curve in curves:
            way = Way(curve.collective, *curve.way, curve.segment_nbytes)
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


def _ways(allowed: dict[str, list[tuple[str, str]]], collectives: Sequence[str]) -> list[Way]:
    found = []
    for collective in collectives:
        for topology, variant in allowed[collective]:
            pipelined = collective == "all_reduce" or (topology != "mesh" and collective != "barrier")
            found += [Way(collective, topology, variant, s) for s in (SEGMENTS if pipelined else (0,))]
    return found


def _price(way: Way, network: Network, order: str, nbytes: int) -> float:
    segment = way.segment_nbytes or 1 << 40
    if way.collective == "all_reduce":
        return estimate.all_reduce(way.topology, way.variant, order, network, nbytes, segment).seconds
    segment = min(segment, max(ITEMSIZE, nbytes // 16)) if way.topology != "mesh" else segment
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
