#!/usr/bin/env python3
"""The bundled model trained over lossy wires, with and without feedback: losses, bytes, and a picture of both.

    python benchmarks/slow_link_training.py --out slow-link-training.svg

Runs `examples/train_slow_link.py` under `hostring launch`, for every wire and number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_slow_link.py"
WIRES = ("float32", "mxint8-both", "mxfp4-both")
COLOURS = {"float32": "#000000", "mxint8-both": "#0072B2", "mxfp4-both": "#D55E00"}
SMOOTHED = 15  # steps in each mean that is drawn


def train(ranks: int, wire: str, feedback: bool, steps: int, folder: str) -> dict[str, Any]:
    """One run. Returns what the example wrote."""
    out = Path(folder) / "run.json"
    arguments = ["--steps", str(steps), "--out", str(out), "--feedback" if feedback else "--no-feedback"]
    command = [sys.executable, "-m", "hostring", "launch", "-n", str(ranks), str(EXAMPLE), *arguments]
    subprocess.run(command, env={**os.environ, "HOSTRING_WIRE": wire}, check=True, stdout=subprocess.DEVNULL)
    run: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return run


def draw(rows: list[dict[str, Any]], out: str) -> None:
    """A panel for each number of ranks: loss over steps."""
    worlds = sorted({row["ranks"] for row in rows})
    figure, axes = plt.subplots(1, len(worlds), figsize=(5 * len(worlds), 4), layout="constrained", sharey=True)
    for axis, ranks in zip(np.atleast_1d(axes), worlds, strict=True):
        for row in (row for row in rows if row["ranks"] == ranks):
            steps, losses = np.asarray(row["curve"]).T
            smooth = np.convolve(losses, np.full(SMOOTHED, 1 / SMOOTHED), "valid")
            style = "-" if row["feedback"] else ":"
            axis.plot(
                steps[SMOOTHED - 1 :], smooth, style, color=COLOURS[row["wire"]], linewidth=1.4, label=row["name"]
            )
        axis.set_title(f"{ranks} ranks")
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel(f"training loss, mean of {SMOOTHED} steps")
    np.atleast_1d(axes)[-1].legend(fontsize=8)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", help="a picture")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            exact = 0.0
            for wire in WIRES:
                for feedback in (True, False) if wire != "float32" else (True,):
                    run = train(ranks, wire, feedback, options.steps, folder)
                    exact = run["held_out"] if wire == "float32" else exact
                    name = wire if wire == "float32" else f"{wire}, {'with' if feedback else 'no'} feedback"
                    rows.append({**run, "ranks": ranks, "wire": wire, "feedback": feedback, "name": name})
                    more = 100 * (run["held_out"] / exact - 1)
                    words = f"held-out loss {run['held_out']:.4f} ({more:+5.2f} %)  bytes {run['share']:.3f}"
                    print(f"{ranks} ranks  {name:26}  {words}", flush=True)
    if options.out:
        draw(rows, options.out)


if __name__ == "__main__":
    main()
