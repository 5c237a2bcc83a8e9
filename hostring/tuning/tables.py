"""What was measured of a group, kept in a file, and the table of thresholds that follows from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hostring.cost.network import Network
from hostring.engine.choice import WHOLE, Table, Threshold, Tuner
from hostring.topologies.rules import Way

VERSION: Final = 1
_SIZES: Final = tuple(1 << k for k in range(6, 27))
MIN_GAIN: Final = 1.05  # a smaller gain is not worth another threshold


@dataclass
class Curve:
    """What one way of doing one collective costs, by size.

    Attributes:
        segment_nbytes: of the pipeline; 0 is the default.
        predicted, measured: seconds by bytes. Not all sizes need to be measured.
    """

    collective: str
    topology: str
    variant: str
    segment_nbytes: int
    predicted: dict[int, float] = field(default_factory=dict)
    measured: dict[int, float] = field(default_factory=dict)

    @property
    def way(self) -> Way:
        return self.topology, self.variant

    @property
    def name(self) -> str:
        name = f"{self.topology}/{self.variant}" if self.variant else self.topology
        return f"{name} {self.segment_nbytes >> 10}K" if self.segment_nbytes else name

    def seconds(self, nbytes: int) -> float | None:
        """As measured at or around this size; else as predicted, scaled by the error at the nearest measurement."""
        if self.measured and min(self.measured) <= nbytes <= max(self.measured):
            return _between(self.measured, nbytes)
        if not self.predicted:
            return None
        guess = _between(self.predicted, nbytes)
        common = [n for n in self.measured if n in self.predicted]
        if not common:
            return guess
        nearest = min(common, key=lambda n: abs(math.log(max(n, 1) / max(nbytes, 1))))
        return guess * self.measured[nearest] / self.predicted[nearest]


def _between(points: dict[int, float], nbytes: int) -> float:
    """Interpolated on logarithmic axes; beyond the ends, in proportion to the size above, and as at the end below."""
    sizes = sorted(points)
    if nbytes <= sizes[0]:
        return points[sizes[0]]
    if nbytes >= sizes[-1]:
        return points[sizes[-1]] * (nbytes / sizes[-1] if sizes[-1] else 1)
    above = next(i for i, size in enumerate(sizes) if size >= nbytes)
    low, high = sizes[above - 1], sizes[above]
    share = math.log(nbytes / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(points[low]) + share * math.log(points[high]))


@dataclass
class Tuning:
    """Everything that was measured of one group.

    Attributes:
        source: when and how, for people. network: the links. curves: what was priced, and what of it was measured.
    """

    source: str
    network: Network
    curves: list[Curve]

    def table(self, tuner: Tuner) -> Table:
        """The quickest way for every collective and size, among those that `tuner` allows, with few thresholds."""
        found: dict[str, list[Threshold]] = {}
        for collective, ways in tuner.allowed.items():
            curves = [c for c in self.curves if c.collective == collective and c.way in ways]
            if curves:
                found[collective] = _thresholds(curves)
        return found

    def reasons(self, collective: str, nbytes: int, ways: Sequence[Way]) -> list[tuple[str, float]]:
        """What the ways of doing it cost by this tuning, the quickest first."""
        curves = [
            c
            for c in self.curves
            if c.collective == collective and c.way in ways and min(c.predicted or c.measured) <= nbytes
        ]
        costs = [(c.name, seconds) for c in curves if (seconds := c.seconds(nbytes)) is not None]
        return sorted(costs, key=lambda cost: cost[1])

    def to_json(self) -> dict[str, Any]:
        rows = [
            [
                c.collective,
                c.topology,
                c.variant,
                c.segment_nbytes,
                sorted(c.predicted.items()),
                sorted(c.measured.items()),
            ]
            for c in self.curves
        ]
        return {"version": VERSION, "source": self.source, "network": self.network.to_json(), "curves": rows}

    @classmethod
    def from_json(cls, plain: Any) -> Tuning:
        """Raises: ValueError, when this is not what `to_json` gave."""
        try:
            if plain["version"] != VERSION:
                raise ValueError(f"version {plain['version']}, expected {VERSION}; run `hostring tune` again")
            curves = [
                Curve(str(c), str(t), str(v), int(s), _points(p), _points(m)) for c, t, v, s, p, m in plain["curves"]
            ]
            return cls(str(plain["source"]), Network.from_json(plain["network"]), curves)
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"{type(exc).__name__}: {exc}") from exc


def _points(rows: Iterable[Sequence[Any]]) -> dict[int, float]:
    points = {int(nbytes): float(seconds) for nbytes, seconds in rows}
    if not all(seconds > 0 for seconds in points.values()):
        raise ValueError("a time is not above 0")
    return points


def _thresholds(curves: Sequence[Curve]) -> list[Threshold]:
    found: list[Threshold] = []
    current: Curve | None = None
    for nbytes in _SIZES:
        chosen = _choose(curves, nbytes, current)
        if chosen is not current:
            if found:
                found[-1] = replace(found[-1], upto=nbytes // 2)
            found.append(Threshold(WHOLE, chosen.topology, chosen.variant, chosen.segment_nbytes))
            current = chosen
    return found


def _choose(curves: Sequence[Curve], nbytes: int, current: Curve | None) -> Curve:
    """The quickest for this size. What was measured comes before what was predicted; a small gain changes nothing."""
    sizes = sorted({size for c in curves for size in c.measured})
    near = min(max(nbytes, sizes[0]), sizes[-1]) if sizes else 0
    tried = [c for c in curves if c.measured and min(c.measured) <= near <= max(c.measured)]
    costs = [(seconds, c) for c in tried or curves if (seconds := c.seconds(nbytes)) is not None]
    best = min(seconds for seconds, _ in costs)
    good = [c for seconds, c in costs if seconds <= MIN_GAIN * best]
    return next((c for c in good if c is current), good[0])


def choice_in(table: Table, collective: str, nbytes: int) -> str:
    """The name of what `table` has for a size, as `Curve.name` writes it; "-" when it has nothing."""
    threshold = _threshold(table, collective, nbytes)
    if threshold is None:
        return "-"
    return Curve(collective, threshold.topology, threshold.variant, threshold.segment_nbytes).name


def chosen_curve(curves: Sequence[Curve], table: Table, collective: str, nbytes: int) -> Curve | None:
    """The one of `curves` that `table` has for a size."""
    t = _threshold(table, collective, nbytes)
    same = (c for c in curves if t is not None and c.collective == collective and c.way == (t.topology, t.variant))
    return next((c for c in same if t is not None and c.segment_nbytes == t.segment_nbytes), None)


def _threshold(table: Table, collective: str, nbytes: int) -> Threshold | None:
    return next((t for t in table.get(collective, ()) if nbytes <= t.upto), None)


def save(tuning: Tuning, path: Path) -> None:
    """Write it so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}")
    half.write_text(json.dumps(tuning.to_json()) + "\n", encoding="utf-8")
    half.replace(path)


def load(path: Path) -> Tuning:
    """Raises: ValueError, naming the file; FileNotFoundError."""
    try:
        return Tuning.from_json(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as exc:
        raise ValueError(f"{path} is no tuning that can be used: {exc}") from exc
