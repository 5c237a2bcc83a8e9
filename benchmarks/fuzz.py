"""Throws broken input at everything that reads bytes from elsewhere. Run: `python benchmarks/fuzz.py --inputs 1000000`.

Each target (`fuzz_targets.py`) is a decoder, some good inputs, and the exceptions that it documents. The same seed
gives the same inputs (`fuzz_inputs.py`). A target fails when it raises anything else, takes longer than `MAX_INPUT_S`,
or wants more memory than `--memory` allows. `tests/engine/test_fuzz.py` throws hypothesis's inputs at the same targets
and keeps what once failed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from fuzz_inputs import damaged
from fuzz_targets import Target, targets

MAX_INPUT_S = 1.0  # of computing, for one input; what is unbounded takes longer
MAX_BUSY_INPUT_S = 30.0  # in all, on a busy machine
MAX_FAILURES = 20  # of one target; then the next one


@dataclass
class Tally:
    """What came of one target."""

    inputs: int = 0
    accepted: int = 0
    slowest: float = 0.0
    failures: list[tuple[bytes, str]] = field(default_factory=list)


def attempt(target: Target, data: bytes, tally: Tally) -> None:
    started, computed = time.perf_counter(), time.process_time()
    try:
        target.read(data)
        tally.accepted += 1
    except target.documented:
        pass
    except Exception as exc:
        tally.failures.append((data, f"{type(exc).__name__}: {exc}"))
    took, waited = time.process_time() - computed, time.perf_counter() - started
    tally.slowest = max(tally.slowest, took)
    tally.inputs += 1
    if took > MAX_INPUT_S or waited > MAX_BUSY_INPUT_S:
        tally.failures.append((data, f"took {took:.1f} s of computing, {waited:.1f} s in all"))


def limit_memory(beyond_gb: float) -> None:
    """Let this process take so much address space beyond what it uses now."""
    if sys.platform == "linux":
        import resource

        now = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + int(beyond_gb * 1e9), resource.RLIM_INFINITY))


def tallied(target: Target, inputs: int, seed: int) -> Tally:
    """Throw its good inputs and so many broken ones at `target`, and print what came of it."""
    tally = Tally()
    for good in target.seeds:
        with contextlib.suppress(*target.documented):
            target.read(good)  # the first call imports things
        attempt(target, good, tally)
    stream = damaged(target.seeds, random.Random(f"{seed} {target.name}"))
    started = time.perf_counter()
    for _ in range(inputs):
        attempt(target, next(stream), tally)
        if len(tally.failures) >= MAX_FAILURES:
            break
    print(
        f"{target.name:14} {tally.inputs:8} inputs, {tally.accepted:7} taken, {len(tally.failures)} failures, "
        f"slowest {tally.slowest * 1e3:.1f} ms, {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    for data, why in tally.failures[:5]:
        print(f"    {why[:300]}\n    {data!r}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--memory", type=float, default=4.0, help="GB of address space beyond what is used at the start"
    )
    parser.add_argument("--only", default="", help="one target's name")
    args = parser.parse_args()
    chosen = [t for t in targets() if args.only in ("", t.name)]
    limit_memory(args.memory)
    total = sum(t.share for t in chosen)
    tallies = [tallied(t, int(args.inputs * t.share / total) + 1, args.seed) for t in chosen]
    failures = sum(len(tally.failures) for tally in tallies)
    print(f"{sum(tally.inputs for tally in tallies)} inputs, {failures} failures")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
