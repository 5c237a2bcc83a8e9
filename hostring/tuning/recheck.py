"""Whether a tuning holds: measures again what it chose, and compares with the first measurement and the prediction."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hostring.engine.movements import Movements
from hostring.engine.session import Session
from hostring.tuning.tables import Curve, Tuning, chosen_curve
from hostring.tuning.timing import Way, time_ways
from hostring.tuning.trial import TRIED

MAX_DRIFT: Final = 1.5  # between the first measurement and the second, either way
MAX_DRIFTED: Final = 0.25  # of the points
MAX_MISPREDICTED: Final = 2.0  # between prediction and second measurement, either way, for half of the points
ROUNDS: Final = 3


@dataclass(frozen=True)
class Point:
    """One size of one collective, by its chosen schedule. Times in seconds; `first` is None where it wasn't tried."""

    collective: str
    name: str
    nbytes: int
    predicted: float
    first: float | None
    second: float

    def words(self) -> str:
        return f"{self.collective} of {self.nbytes} bytes by {self.name}"


def recheck(
    session: Session, tuning: Tuning, sizes: Sequence[int], seconds: float, say: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Measure again what rank 0's `tuning` chose. Every rank calls this alike.

    Returns:
        On every rank, why the tuning should not be kept; empty where it holds.
    """
    movements = Movements(session)
    chosen = _chosen(session, tuning, sizes) if session.rank == 0 else []
    plan = json.dumps([(c.collective, *c.way, c.segment_nbytes, nbytes) for c, nbytes in chosen]).encode()
    points = []
    for n, (*way, nbytes) in enumerate(json.loads(movements.broadcast_bytes(plan, 0))):
        say(f"{way[0]} of {nbytes} bytes, once more")
        ((_, second),) = time_ways(session, [Way(*way)], nbytes, seconds, ROUNDS).items()
        if session.rank == 0:
            curve = chosen[n][0]
            first = curve.measured.get(nbytes)
            points.append(Point(way[0], curve.name, nbytes, curve.predicted[nbytes], first, second))
    found: list[str] = json.loads(movements.broadcast_bytes(json.dumps(doubts(points)).encode(), 0))
    return found


def doubts(points: Sequence[Point]) -> list[str]:
    """Why a tuning with these points should not be kept."""
    found = []
    drifts = {p: p.second / p.first for p in points if p.first is not None}
    drifted = [p for p, drift in drifts.items() if _either_way(drift) > MAX_DRIFT]
    if len(drifted) > MAX_DRIFTED * len(drifts):
        worst = max(drifted, key=lambda p: _either_way(drifts[p]))
        assert worst.first is not None
        found.append(
            f"{len(drifted)} of {len(drifts)} choices took {MAX_DRIFT}x as long, or as short, when measured again: "
            f"{worst.words()} {worst.first * 1e6:.1f} us, then {worst.second * 1e6:.1f} us"
        )
    errors = {p: p.predicted / p.second for p in points}
    if points and statistics.median(map(_either_way, errors.values())) > MAX_MISPREDICTED:
        percent = sorted(abs(100 * (error - 1)) for error in errors.values())
        found.append(f"predictions are {percent[0]:.0f} to {percent[-1]:.0f} % off, and more than half of them by 2x")
    return found


def _either_way(factor: float) -> float:
    return max(factor, 1 / factor)


def _chosen(session: Session, tuning: Tuning, sizes: Sequence[int]) -> list[tuple[Curve, int]]:
    """What the tuning chose for each collective that can be tried, at the sizes that were priced."""
    table = tuning.table(session.tuner)
    curves = {(c, nbytes): chosen_curve(tuning.curves, table, c, nbytes) for c in TRIED for nbytes in sizes}
    return [(curve, nbytes) for (_, nbytes), curve in curves.items() if curve is not None and nbytes in curve.predicted]
