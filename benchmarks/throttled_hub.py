#!/usr/bin/env python3
"""Does `hostring plan topology` know at how many ranks a star's hub becomes the constraint? Predicted and measured,
side by side.

    python benchmarks/throttled_hub.py --hub-mbit 50 --leaf-mbit 20 --ranks 2..8

Every rank gets a network namespace on one switch; the hub's and the leaves' interfaces have token buckets, both ways.
An all-reduce is measured by star, mesh and ring in interleaved rounds, and the star once more with a hub without a
limit. The hub is the constraint where its limit costs the star more than 10 %; another topology is named where it is
more than 5 %
better for this and all larger groups: the same definitions for both columns. Needs root. Exit code 1 when a
prediction is off by more than one rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from links import Switch, start_ranks, wait_ranks

from hostring.bench.sizes import parse_size
from hostring.commands.plan import ACTIVE, BETTER, Point, change_from, parse_ranks, price_point
from hostring.cost.network import from_links
from hostring.engine.choice import SEGMENT_NBYTES


def measure(
    world_size: int, mbit: list[float | None], topologies: str, options: argparse.Namespace
) -> dict[str, float]:
    """Median seconds of an all-reduce by each topology."""
    with Switch(world_size, mbit, options.queue_ms) as hosts, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        bench = [
            "-m",
            "hostring.bench",
            "all_reduce",
            "--sizes",
            options.size,
            "--topology",
            topologies,
            "--transport",
            "tcp",
        ]
        effort = ["--rounds", str(options.rounds), "--iterations", str(options.iterations), "--json", str(out)]
        ranks = start_ranks(
            hosts, [sys.executable, *bench, *effort], world_size, env={"HOSTRING_TUNING": "off"}, stdout=-3
        )
        wait_ranks(ranks, options.timeout)
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        raise RuntimeError(f"{wrong} wrong elements with {world_size} ranks")
    return {row["contender"]: row["p50_us"] * 1e-6 for row in rows}


def first_active(points: dict[int, tuple[float, float]]) -> int | None:
    """From which group on the hub's limit costs the star more than it may. points: (star, star with a free hub)."""
    return next((n for n, (star, free) in sorted(points.items()) if star > ACTIVE * free), None)


def first_worse(points: dict[int, dict[str, float]]) -> int | None:
    """From which group on another topology is always better than the star."""
    found = None
    for n, times in sorted(points.items(), reverse=True):
        if times["star"] <= BETTER * min(s for name, s in times.items() if name != "star"):
            break
        found = n
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hub-mbit", type=float, default=50.0)
    parser.add_argument("--leaf-mbit", type=float, default=20.0)
    parser.add_argument("--ranks", default="2..8")
    parser.add_argument("--size", default="1M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one group")
    parser.add_argument(
        "--queue-ms", type=float, default=200.0, help="long, so that the rates limit and not TCP's losses"
    )
    parser.add_argument("--json", help="write all figures to a file")
    return parser.parse_args()


@dataclass
class Seen:
    """What was predicted and measured, by number of ranks.

    Attributes:
        measured: seconds of each topology.
        free: seconds of the star with a hub without a limit.
    """

    predicted: list[Point] = field(default_factory=list)
    measured: dict[int, dict[str, float]] = field(default_factory=dict)
    free: dict[int, float] = field(default_factory=dict)

    def add(self, n: int, options: argparse.Namespace) -> None:
        """Predict and measure groups of `n` ranks, and print a line."""
        hub = {"0": {"gbit_per_s": options.hub_mbit / 1e3}}
        links = {"latency_us": 60, "gbit_per_s": options.leaf_mbit / 1e3, "ranks": hub}
        point = price_point(from_links(links, n), parse_size(options.size), "rank", (SEGMENT_NBYTES,))
        self.predicted.append(point)
        leaves: list[float | None] = [options.leaf_mbit] * (n - 1)
        self.measured[n] = measure(n, [options.hub_mbit, *leaves], "star,mesh,ring", options)
        self.free[n] = measure(n, [None, *leaves], "star", options)["star"]
        offers = {name: offer.seconds for name, offer in point.offers.items()}
        cells = [(self.measured[n][name], offers[name]) for name in ("star", "mesh", "ring")]
        cells.insert(1, (self.free[n], point.free))
        print(f"{n:>5} " + " ".join(f"{a * 1e3:>8.1f} ({b * 1e3:>6.1f})" for a, b in cells), flush=True)

    def answers(self) -> dict[str, tuple[int | None, int | None]]:
        """From which number of ranks on, as measured and as predicted."""
        change = change_from(self.predicted)
        stars = {n: (times["star"], self.free[n]) for n, times in self.measured.items()}
        said = next((p.world_size for p in self.predicted if p.hub_active), None)
        return {
            "the hub is the constraint from": (first_active(stars), said),
            "another topology is better from": (
                first_worse(self.measured),
                None if change is None else change.world_size,
            ),
        }

    def as_dict(self) -> dict[str, Any]:
        prices = {p.world_size: {name: offer.seconds for name, offer in p.offers.items()} for p in self.predicted}
        return {"answers": self.answers(), "measured": self.measured, "free": self.free, "predicted": prices}


def main() -> int:
    options, seen, off = parsed(), Seen(), False
    low, high = parse_ranks(options.ranks)
    rates = f"hub {options.hub_mbit:g} Mbit/s, leaves {options.leaf_mbit:g} Mbit/s"
    print(f"all_reduce of {options.size}, {rates}, milliseconds: measured (predicted)")
    print(f"{'ranks':>5} {'star':>17} {'free hub':>17} {'mesh':>17} {'ring':>17}")
    for n in range(low, high + 1):
        seen.add(n, options)
    for what, (measured, predicted) in seen.answers().items():
        unknown = measured is None or predicted is None
        far = measured != predicted if unknown else abs(measured - predicted) > 1
        off = off or far
        print(
            f"{what}: measured {measured} ranks, predicted {predicted}: {'off by more than one' if far else 'agrees'}"
        )
    if change_from(seen.predicted) is not None:
        times = seen.measured[high]
        best = min((name for name in times if name != "star"), key=lambda name: times[name])
        print(f"change to: measured best {best}, predicted {seen.predicted[-1].best.topology}")
    if options.json:
        Path(options.json).write_text(json.dumps(seen.as_dict(), indent=1) + "\n", encoding="utf-8")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
