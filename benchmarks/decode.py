#!/usr/bin/env python3
"""Tokens per second of hostring on one rank and on several, and of llama.cpp on the same file, in one run.

    python benchmarks/decode.py --model SmolLM2-135M-Instruct.Q4_1.gguf          # over loopback TCP
    python benchmarks/decode.py --model … --mbit 1000 [--delay-us 50]            # between namespaces; needs root
    python benchmarks/decode.py --model … --compute exact --dtypes float16,bfloat16 --rounds 9 --json out.json
    python benchmarks/decode.py --model … --prompt-tokens 512 --tokens 2         # for the prefill

All processes are started once and load their weights once. Each has one core and one thread, but for llama.cpp with
more threads.
They take turns, round by round, so that what else this machine does hits all of them; a process whose turn it is not
waits for its standard input. Reported are medians over rounds; ratios are medians of the ratios of each round.
llama.cpp takes part where the model is a GGUF file and xllamacpp is installed. Greedy decoding: one rank and several
must write the same tokens, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import decode_worker
from links import Delayed, Switch, start_ranks

PHASES = ("stage", "wait", "transfer", "fold")
END_S = 10.0  # how long a process may take to end


@dataclass
class Contender:
    """Processes that decode together. `results`: one per round, each a list by rank."""

    label: str
    processes: list[subprocess.Popen[str]]
    cores: list[list[int]]  # of each process, or what a lone process takes in turn
    ids: list[int] | None = None
    results: list[list[dict[str, Any]]] = field(default_factory=list)

    def wait_ready(self) -> dict[str, Any]:
        """Wait for all; returns what the first says."""
        first, *_ = [_hear(process) for process in self.processes]
        return first

    def round(self, number: int) -> None:
        """One generation. A lone process changes cores from round to round, since the others use all of them."""
        for k, process in enumerate(self.processes):
            cores = self.cores[k] if len(self.processes) > 1 else self.cores[number % len(self.cores)]
            assert process.stdin is not None
            process.stdin.write(json.dumps({"cores": cores, "ids": self.ids}) + "\n")
            process.stdin.flush()
        self.results.append([_hear(process) for process in self.processes])

    def rates(self, what: str) -> list[float]:
        """Of rank 0, by round."""
        return [ranks[0][what] or 0.0 for ranks in self.results]


def _hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    while line := process.stdout.readline():
        with contextlib.suppress(json.JSONDecodeError):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError(f"a process ended with exit code {process.wait(END_S)}; its messages are above")


@contextlib.contextmanager
def started(options: argparse.Namespace) -> Iterator[list[Contender]]:
    """All contenders, their weights loaded; hostring on one rank comes first."""
    cores = sorted(os.sched_getaffinity(0))
    argv = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        lone = subprocess.Popen([*argv, "--worker", "rank"], env=alone, **pipes)
        contenders = [Contender("hostring, 1 rank", [lone], [[core] for core in cores])]
        stack.callback(_end, contenders)
        hosts = stack.enter_context(_hosts(options))
        ranks = _start(options, hosts, [*argv, "--worker", "rank"], pipes)
        places = [[cores[rank % len(cores)]] for rank in range(options.ranks)]
        contenders.append(Contender(f"hostring, {options.ranks} ranks, {_words(options)}", ranks, places))
        for threads in _llama_threads(options, len(cores)):
            command = [*argv, "--worker", "llama.cpp", "--threads", str(threads)]
            process = subprocess.Popen(command, **pipes)
            turns = [[core] for core in cores] if threads == 1 else [cores[:threads]]
            contenders.append(Contender(f"llama.cpp, {threads} thread{'s' * (threads > 1)}", [process], turns))
        ready = [contender.wait_ready() for contender in contenders]
        for contender in contenders:
            contender.ids = ready[0]["ids"]
        yield contenders


def _start(options: argparse.Namespace, hosts: Any, argv: list[str], pipes: dict[str, Any]) -> list[Any]:
    if hosts is not None:
        found: list[Any] = start_ranks(hosts, argv, options.ranks, **pipes)
        return found
    port = str(20000 + os.getpid() % 10000)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(options.ranks), "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen(argv, env={**os.environ, **group, "RANK": str(r)}, **pipes) for r in range(options.ranks)]


def _llama_threads(options: argparse.Namespace, n_cores: int) -> list[int]:
    if not str(options.model).endswith(".gguf") or importlib.util.find_spec("xllamacpp") is None:
        return []
    return sorted({1, min(options.ranks, n_cores)})


def _end(contenders: Sequence[Contender]) -> None:
    processes = [process for contender in contenders for process in contender.processes]
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    until = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _hosts(options: argparse.Namespace) -> Any:
    if options.delay_us is not None:
        if options.ranks != 2:
            raise SystemExit("--delay-us joins two hosts; use --ranks 2, or --mbit alone for more")
        return Delayed(options.delay_us, options.mbit or 1000.0)
    if options.mbit is not None:
        return Switch(options.ranks, [options.mbit] * options.ranks)
    return contextlib.nullcontext()


def _words(options: argparse.Namespace) -> str:
    if options.delay_us is not None:
        return f"{options.mbit or 1000:g} Mbit/s and {options.delay_us:g} us each way"
    return f"{options.mbit:g} Mbit/s switch" if options.mbit is not None else f"loopback {options.transport}"


def table(contenders: Sequence[Contender]) -> list[str]:
    """A line for each contender: rates, and their ratios to hostring on one rank and to llama.cpp on one thread."""
    llama = next((c for c in contenders if c.label == "llama.cpp, 1 thread"), None)
    width = max(len(c.label) for c in contenders)
    lines = [
        f"{'':<{width}}  {'decode':>9} {'x 1 rank':>9} {'x llama.cpp':>12}  "
        f"{'prefill':>9} {'x 1 rank':>9} {'x llama.cpp':>12}"
    ]
    lines.append(f"{'':<{width}}  {'tokens/s':>9} {'':>9} {'1 thread':>12}  {'tokens/s':>9} {'':>9} {'1 thread':>12}")
    for contender in contenders:
        cells = []
        for what in ("decode_tokens_per_s", "prefill_tokens_per_s"):
            cells.append(
                f"{statistics.median(contender.rates(what)):>9.1f} {_ratio(contender, contenders[0], what):>9}"
            )
            cells.append(f"{'-' if llama is None else _ratio(contender, llama, what):>12} ")
        lines.append(f"{contender.label:<{width}}  {' '.join(cells)}".rstrip())
    return lines


def _ratio(contender: Contender, other: Contender, what: str) -> str:
    pairs = zip(contender.rates(what), other.rates(what), strict=True)
    return f"{statistics.median(a / b for a, b in pairs if b):.2f}x" if any(other.rates(what)) else "-"


def where_time_goes(contender: Contender) -> list[str]:
    """Microseconds of a decoded token on each rank, and whom it waited for."""
    lines = [f"{contender.label}, us per token"]
    for rank in range(len(contender.processes)):
        rounds = [ranks[rank] for ranks in contender.results]
        steps = max(1, rounds[0]["generated_tokens"] - 1)
        phases = ["compute", *PHASES, "rest"]
        cells = [f"{p} {statistics.median(r['seconds'].get(p, 0.0) for r in rounds) / steps * 1e6:.0f}" for p in phases]
        waited: dict[str, float] = {}
        for r in rounds:
            for peer, seconds in r["waited_for"].items():
                waited[peer] = waited.get(peer, 0.0) + seconds / steps / len(rounds)
        whom = ", ".join(f"{s * 1e6:.0f} for rank {peer}" for peer, s in waited.items())
        lines.append(f"  rank {rank}: {', '.join(cells)}{f' ({whom})' if whom else ''}")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file or a Hugging Face directory; the bundled model when not given")
    parser.add_argument("--prompt", default="Tell me about the sea.")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="repeat the prompt's ids up to so many")
    parser.add_argument("--tokens", type=int, default=64, help="per generation")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compute", default="auto", choices=("auto", "packed", "exact"))
    parser.add_argument("--dtypes", default="float32", help="of exact ranks: one for all, or one per rank")
    parser.add_argument("--topology", default="auto")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--mbit", type=float, help="ranks in namespaces on a switch, with this rate")
    parser.add_argument("--delay-us", type=float, help="two ranks in namespaces, this far apart each way")
    parser.add_argument("--json", help="write all figures to a file")
    parser.add_argument("--worker", choices=("rank", "llama.cpp"), help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None:
        import hostring.integrations.llm as llm

        options.model = str(Path(llm.__file__).parent / "tiny")
    return options


def main() -> int:
    options = parse()
    if options.worker is not None:
        (decode_worker.rank if options.worker == "rank" else decode_worker.llama_cpp)(options)
        return 0
    with started(options) as contenders:
        for number in range(-1, options.rounds):  # the first is not counted: caches are cold
            for contender in contenders:
                contender.round(max(0, number))
            if number < 0:
                for contender in contenders:
                    contender.results.clear()
            else:
                seen = ", ".join(f"{c.label}: {c.rates('decode_tokens_per_s')[-1]:.1f}" for c in contenders)
                print(f"round {number + 1} of {options.rounds}: tokens/s {seen}", file=sys.stderr, flush=True)
    ranks = contenders[:2]
    print("\n".join([*table(contenders), "", *(line for c in ranks for line in where_time_goes(c))]))
    if options.json:
        rows = {c.label: c.results for c in contenders}
        text = json.dumps({"settings": {**vars(options), "json": None}, "rounds": rows}, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    texts = {tuple(rank["tokens"]) for c in ranks for results in c.results for rank in results}
    print(f"tokens: {'the same everywhere' if len(texts) == 1 else f'{len(texts)} different answers'}")
    return 1 if len(texts) != 1 and set(options.dtypes.split(",")) == {"float32"} else 0


if __name__ == "__main__":
    sys.exit(main())
