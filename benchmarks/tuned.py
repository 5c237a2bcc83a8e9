#!/usr/bin/env python3
"""How far is what the tuner chose from the best schedule? Tunes, then measures the choice beside every variant.

    python benchmarks/tuned.py --ranks 2,3,4                        # loopback TCP
    python benchmarks/tuned.py --ranks 2,3,4 --mbit 1000            # between namespaces on a switch; needs root

The measurement is another one than the one that the tuner chose by, in interleaved rounds. Each variant runs with the
segment length that was best for it. With --defaults, what is chosen without tuning is compared. Exit code 1 when a
choice is more than --within off at some size, unless it is the same schedule as the best, which can only be noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from links import Switch, start_ranks, wait_ranks

from hostring.launch.ranks import launch

WAYS = "auto,mesh/one_shot,mesh/two_shot,ring/relay,ring/chain,star"


def run(hosts: Switch | None, arguments: list[str], world_size: int, env: dict[str, str], seconds: float) -> None:
    """One command as `world_size` ranks."""
    if hosts is None:
        code = launch(["-m", *arguments], world_size, env=env)
        if code:
            raise RuntimeError(f"{' '.join(arguments)} ended with exit code {code}")
    else:
        wait_ranks(start_ranks(hosts, [sys.executable, "-m", *arguments], world_size, env=env, pin=True), seconds)


def compare(world_size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the benchmark after tuning."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rates = [options.mbit] * world_size
        hosts = (
            stack.enter_context(Switch(world_size, rates, burst=options.burst)) if options.mbit is not None else None
        )
        tuning, out = str(folder / "tuning.json"), folder / "rows.json"
        common = ["--sizes", options.sizes, "--transport", "tcp", "--pin"]
        if not options.defaults:
            effort = ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
            run(
                hosts,
                ["hostring.commands.cli", "tune", *common, *effort, "--output", tuning],
                world_size,
                {},
                options.timeout,
            )
        env = {"HOSTRING_TUNING": "off" if options.defaults else tuning}
        effort = ["--rounds", str(options.rounds), "--seconds", str(options.seconds), "--json", str(out)]
        run(
            hosts,
            ["hostring.bench", "all_reduce", *common, *effort, "--topology", WAYS],
            world_size,
            env,
            options.timeout,
        )
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[tuple[int, str, str, float]]:
    """(size, what was chosen, what was best, by how much the choice took longer) for every size."""
    found = []
    for nbytes in sorted({row["nbytes"] for row in rows}):
        here = [row for row in rows if row["nbytes"] == nbytes]
        auto = next(row for row in here if row["contender"] == "auto")
        best = min((row for row in here if row is not auto), key=lambda row: row["p50_us"])
        found.append((nbytes, auto["schedule"], best["schedule"], auto["p50_us"] / best["p50_us"] - 1))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--sizes", default="64B:16M")
    parser.add_argument("--mbit", type=float, help="between namespaces, at this rate")
    parser.add_argument("--burst", type=int, default=0, help="see links.Switch")
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--within", type=float, default=0.15)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", help="write all figures to a file")
    options = parser.parse_args()
    off, all_rows = 0, {}
    for world_size in map(int, options.ranks.split(",")):
        all_rows[world_size] = rows = compare(world_size, options)
        print(f"{world_size} ranks, {'loopback' if options.mbit is None else f'{options.mbit:g} Mbit/s'}:")
        for nbytes, chosen, best, over in verdicts(rows):
            bad = over > options.within and chosen != best
            off += bad
            print(
                f"  {nbytes:>9} bytes: {chosen:<15} best {best:<15} {100 * over:+6.1f} %{'  <- off' if bad else ''}",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(
            json.dumps({"cores": os.cpu_count(), "rows": all_rows}, indent=1) + "\n", encoding="utf-8"
        )
    print(f"{off} choices are more than {100 * options.within:.0f} % off")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
