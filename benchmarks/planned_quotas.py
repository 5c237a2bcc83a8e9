#!/usr/bin/env python3
"""Does a measured plan pay on unlike ranks? Ranks under CPU quotas, with an even split and with a plan.

    python benchmarks/planned_quotas.py MODEL --quotas 30,70

Every rank runs `hostring generate` in a cgroup of its own that may use so many percent of one core. The plans take
turns. A lane is a rank's computing time per decoded token, stalls by its quota included. On a machine that does other
work too, quotas of a few percent keep their ratio: `--quotas 3,7`. Needs root and a cgroup hierarchy with the cpu
controller that it may write to; ends only the processes that it has started.
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
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

PERIOD_US = 100_000
ALL = "all"
_ROOT = Path("/sys/fs/cgroup")


_STARTED = """
import sys
import hostring.integrations.llm.demo.measure, hostring.integrations.llm.planning.live
from hostring.commands.cli import main
print("ready", flush=True)
sys.stdin.readline()
main()
"""
"""What a rank runs: it is stopped before it joins the others, so that the quota doesn't count its start."""


class Quota:
    """A cgroup for one process, which may use a part of one core."""

    def __init__(self, name: str) -> None:
        old = _ROOT / "cpu"
        self._old = old.is_dir()
        self._folder = (old if self._old else _ROOT) / f"hostring_{os.getpid()}_{name}"
        self._folder.mkdir()

    def limit(self, pid: int, percent: float) -> None:
        """Move the process here, and let it run `percent` of the time."""
        micros = round(PERIOD_US * percent / 100)
        if self._old:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="ascii")
            (self._folder / "cpu.cfs_quota_us").write_text(str(micros), encoding="ascii")
        else:
            (self._folder / "cpu.max").write_text(f"{micros} {PERIOD_US}", encoding="ascii")
        (self._folder / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def remove(self) -> None:
        self._folder.rmdir()


def start(rank: int, n_ranks: int, port: int, arguments: list[str]) -> Any:
    """One rank, until it has imported all that it needs."""
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(n_ranks), "LOCAL_RANK": str(rank)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, "-c", _STARTED, *arguments], env=env, text=True, encoding="utf-8", **pipes
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def run_ranks(options: argparse.Namespace, quotas: Sequence[float], arguments: list[str]) -> str:
    """Run one command on all ranks, each under its quota. Returns what went wrong; nothing when all ended well."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, percent in enumerate(quotas):
            group = Quota(str(rank))
            stack.callback(group.remove)
            process = start(rank, len(quotas), port, arguments)
            stack.callback(process.wait)
            stack.callback(process.kill)
            group.limit(process.pid, percent)
            ranks.append(process)
        for process in ranks:
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.communicate(timeout=options.timeout)[1] for process in ranks]
        failed = any(process.returncode for process in ranks)
    return ("\n".join(text.strip() for text in said).strip() or "a rank failed and said nothing") if failed else ""


def run(options: argparse.Namespace, quotas: Sequence[float], plan: str) -> dict[str, Any]:
    """One run of all ranks. Returns the head rank's figures, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        out, file = Path(folder) / "figures.json", Path(folder) / "plan.json"
        if plan == ALL:
            arguments = ["plan", "model", options.model, "--ranks", "live", "--keep-all", "--json", str(file)]
            if error := run_ranks(options, quotas, [*arguments, "--compute", options.compute]):
                return {"error": error}
        arguments = ["generate", "--model", options.model, "--plan", str(file) if plan == ALL else plan]
        arguments += ["--compute", options.compute, "--device", "cpu", "--temperature", "0"]
        arguments += ["--max-tokens", str(options.max_tokens), "--prompt", "Tell a story."]
        if error := run_ranks(options, quotas, [*arguments, "--timeout", str(options.timeout), "--json", str(out)]):
            return {"error": error}
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
    parser.add_argument("--plans", default="even,all", help="even, auto, all: auto with no rank left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--timeout", type=float, default=600.0)
    options = parser.parse_args()
    quotas = [float(word) for word in options.quotas.split(",")]
    rates: dict[str, list[float]] = {plan: [] for plan in options.plans.split(",")}
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
            predicted = (figures["plan"]["predicted"] or {}).get("decode_tokens_per_s")
            apart = 100 * (max(own) / min(own) - 1)
            print(
                f"{plan}: {found[-1]:.2f} tokens/s, lanes {told} ms ({apart:.0f} % apart), {shares}, {predicted}",
                flush=True,
            )
    even = median(rates["even"]) if rates.get("even") else 0.0
    for plan, found in rates.items():
        if found and even:
            print(f"median of {plan}: {median(found):.2f} tokens/s, {median(found) / even:.2f} times even")


if __name__ == "__main__":
    main()
