#!/usr/bin/env python3
"""DiLoCo against DDP on one slow link: tokens per second, losses, and a picture of both. Needs root, see links.py.

    python benchmarks/diloco_link.py --mbit 100 --one-way-ms 10 --out diloco.svg

Runs `examples/diloco.py` on two hosts: by DDP, by DiLoCo, and by DiLoCo with a rank that is killed in the middle.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from links import Delayed, start_ranks

EXAMPLE = Path(__file__).parent.parent / "examples" / "diloco.py"
TIMEOUT_S = 900.0
SMOOTHED = 15  # steps in each mean that is drawn
RUNS = {"DDP, float32": ["--ddp"], "DiLoCo, mxint8-both": [], "the same, rank 1 killed and back": ["--kill"]}
COLOURS = ("#000000", "#0072B2", "#D55E00")


def run(hosts: Delayed, extra: list[str], steps: int, folder: str) -> dict[str, Any]:
    """One training on both hosts. A rank that was killed is started again. Returns what the example wrote."""
    out = Path(folder) / "run.json"
    argv = [sys.executable, str(EXAMPLE), "--steps", str(steps), "--out", str(out), *extra]
    env = {"HOSTRING_WIRE": "float32" if "--ddp" in extra else "mxint8-both"}
    ranks = start_ranks(hosts, argv, 2, env=env)
    until = time.monotonic() + TIMEOUT_S
    try:
        while any(rank.poll() is None for rank in ranks):
            if ranks[1].poll() == -signal.SIGKILL:
                ranks[1] = start_ranks(hosts, argv, 2, env={**env, "HOSTRING_REJOIN": "1"}, only=1)[0]
            if any(rank.poll() for rank in ranks) or time.monotonic() > until:
                raise RuntimeError(f"exit codes by rank: {[rank.poll() for rank in ranks]}")
            time.sleep(0.1)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def draw(found: dict[str, dict[str, Any]], out: str) -> None:
    """Loss over tokens, and over seconds."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for colour, (name, row) in zip(COLOURS, found.items(), strict=False):
        tokens, seconds, losses = np.asarray(row["curve"]).T
        smooth = np.convolve(losses, np.full(SMOOTHED, 1 / SMOOTHED), "valid")
        for axis, x in zip(axes, (tokens / 1000, seconds), strict=True):
            axis.plot(x[SMOOTHED - 1 :], smooth, color=colour, linewidth=1.4, label=name)
    for axis, label in zip(axes, ("thousand tokens of all ranks", "seconds"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[1].set_xscale("log")
    axes[0].set_ylabel(f"training loss of rank 0, mean of {SMOOTHED} steps")
    axes[0].legend(fontsize=8)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--one-way-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", help="a picture")
    options = parser.parse_args()
    os.environ["HOSTRING_TIMEOUT"] = "300"
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, Delayed(1000 * options.one_way_ms, options.mbit) as hosts:
        for name, extra in RUNS.items():
            killed = [f"1:{options.steps // 2 + 10}"] if extra == ["--kill"] else []
            found[name] = run(hosts, [*extra, *killed], options.steps, folder)
            tokens, seconds, _ = found[name]["curve"][-1]
            words = f"{tokens / seconds:7.0f} tokens/s  held-out loss {found[name]['held_out']:.4f}"
            print(f"{name:34} {words}  load {os.getloadavg()[0]:.1f}", flush=True)
    if options.out:
        draw(found, options.out)


if __name__ == "__main__":
    main()
