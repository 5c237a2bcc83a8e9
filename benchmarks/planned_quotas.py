#!/usr/bin/env python3
"""Does a measured plan pay on unlike ranks? Ranks under CPU quotas, with an even split and with `--plan auto`.

    python benchmarks/planned_quotas.py MODEL --quotas 30,70

Every rank runs `hostring generate` in a cgroup of its own that may use so many percent of one core. The two plans take
turns. A lane is a rank's computing time per decoded token, stalls by its quota included. Needs root and a cgroup
hierarchy with the cpu controller that it may write to; ends only the processes that it has started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

PERIOD_US = 100_000
_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def quota(name: str, percent: float) -> Iterator[Path]:
    """A cgroup for processes that may use `percent` of one core together; its file of processes."""
    old = _ROOT / "cpu"
    folder = (old if old.is_dir() else _ROOT) / f"hostring_{os.getpid()}_{name}"
    folder.mkdir()
    try:
        micros = round(PERIOD_US * percent / 100)
        if old.is_dir():
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="ascii")
            (folder / "cpu.cfs_quota_us").write_text(str(micros), encoding="ascii")
        else:
            (folder / "cpu.max").write_text(f"{micros} {PERIOD_US}", encoding="ascii")
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def run(options: argparse.Namespace, quotas: Sequence[float], plan: str) -> dict[str, Any]:
    """One run of all ranks. Returns the head rank's figures, or what went wrong."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with contextlib.ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "figures.json"
        groups = [stack.enter_context(quota(str(rank), percent)) for rank, percent in enumerate(quotas)]
        command = [sys.executable, "-m", "hostring", "generate", "--model", options.model, "--plan", plan]
        command += ["--compute", options.compute, "--device", "cpu", "--temperature", "0", "--json", str(out)]
        command += ["--max-tokens", str(options.max_tokens), "--prompt", "Tell a story.", "--timeout", "120"]
        ranks = []
        for rank, procs in enumerate(groups):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(quotas)), "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            move = f'echo $$ > {procs}; exec "$@"'
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(["sh", "-c", move, "sh", *command], env=env, **pipes))
        said = [rank.communicate(timeout=options.timeout)[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            return {"error": "\n".join(text.strip() for text in said)}
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def lanes(figures: dict[str, Any]) -> list[float]:
    """Seconds that each rank computes per decoded token."""
    steps = len(figures["tokens"]) - 1
    return [rank["seconds"]["compute"] / steps for rank in figures["per_rank"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quotas", default="30,70", help="percent of one core, for each rank")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--timeout", type=float, default=600.0)
    options = parser.parse_args()
    quotas = [float(word) for word in options.quotas.split(",")]
    rates: dict[str, list[float]] = {"even": [], "auto": []}
    for _ in range(options.rounds):
        for plan, found in rates.items():
            figures = run(options, quotas, plan)
            if "error" in figures:
                print(f"{plan}: {figures['error']}")
                continue
            found.append(figures["decode_tokens_per_s"])
            own = lanes(figures)
            shares = {name: figures["plan"][name] for name in ("kv_groups", "columns", "vocab")}
            told = ", ".join(f"{1e3 * lane:.1f}" for lane in own)
            apart = 100 * (max(own) / min(own) - 1)
            print(f"{plan}: {found[-1]:.2f} tokens/s, lanes {told} ms ({apart:.0f} % apart), {shares}", flush=True)
    if all(rates.values()):
        even, auto = median(rates["even"]), median(rates["auto"])
        print(f"median: even {even:.2f}, auto {auto:.2f} tokens/s: {auto / even:.2f} times")


if __name__ == "__main__":
    main()
