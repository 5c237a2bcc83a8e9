#!/usr/bin/env python3
"""Decoding on two ranks with one core each, against one rank on one core: tokens per second, and where the time goes.

    python benchmarks/decode.py --model SmolLM2-135M-Instruct.Q4_1.gguf  # over loopback TCP
    python benchmarks/decode.py --model … --delay-us 50 --mbit 1000    # between namespaces; needs root
    python benchmarks/decode.py --model … --ranks 2 --dtypes float16,bfloat16 --rounds 9 --json out.json

All processes are started once and load their weights once. Then they take turns, round by round, so that what else this
machine does hits all of them; a process whose turn it is not waits for its standard input and uses no core. Reported
are the median over rounds, and the fastest decile beside it. Greedy decoding: all must write the same tokens, or exit
code 1.
"""

from __future__ import annotations

import argparse
import contextlib
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

from links import Delayed, Switch, start_ranks

PHASES = ("stage", "wait", "transfer", "fold")


# ---------------------------------------------------------------- one rank


def work(options: argparse.Namespace) -> None:
    """A rank: load, say so, then generate once for every line on standard input."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    import hostring
    from hostring.integrations.llm import Sampling, load_model

    torch.set_num_threads(1)
    with hostring.init(topology=options.topology, transport=options.transport) as comm:
        dtypes = options.dtypes.split(",")
        model = load_model(options.model, comm, dtype=dtypes[comm.rank % len(dtypes)])
        _say({"ready": comm.rank})
        for line in sys.stdin:
            core = json.loads(line)["core"]
            if core is not None:
                os.sched_setaffinity(0, {core})
            done = model.generate(options.prompt, Sampling(), max_tokens=options.tokens)
            _say({"tokens": done.tokens, "text": done.text, **done.stats.as_dict()})


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


# ---------------------------------------------------------------- all of them


@dataclass
class Contender:
    """Processes that decode together. `results`: one per round, each a list by rank."""

    label: str
    processes: list[subprocess.Popen[str]]
    cores: list[int | None]
    results: list[list[dict[str, Any]]] = field(default_factory=list)

    def wait_ready(self) -> None:
        for process in self.processes:
            _hear(process)

    def round(self, number: int) -> None:
        """One generation. A lone rank changes cores from round to round, as its opponents use all of them."""
        for k, process in enumerate(self.processes):
            core = self.cores[k] if len(self.processes) > 1 else self.cores[number % len(self.cores)]
            assert process.stdin is not None
            process.stdin.write(json.dumps({"core": core}) + "\n")
            process.stdin.flush()
        self.results.append([_hear(process) for process in self.processes])

    def row(self) -> dict[str, Any]:
        """Medians over rounds, by rank 0's watch; waiting over all ranks."""
        heads = [ranks[0] for ranks in self.results]
        rates = sorted(head["decode_tokens_per_s"] for head in heads)
        waited: dict[str, float] = {}
        for ranks in self.results:
            for rank in ranks:
                for peer, seconds in rank["waited_for"].items():
                    waited[peer] = waited.get(peer, 0.0) + seconds
        shares = [sum(head["seconds"].get(p, 0.0) for p in PHASES) / sum(head["seconds"].values()) for head in heads]
        steps = heads[0]["generated_tokens"] - 1
        phases = {
            p: statistics.median(head["seconds"].get(p, 0.0) for head in heads) / steps
            for p in (*PHASES, "compute", "rest")
        }
        return {
            "label": self.label,
            "rounds": len(heads),
            "tokens_per_s": statistics.median(rates),
            "fastest_decile": rates[min(len(rates) - 1, round(0.9 * (len(rates) - 1)))],
            "ttft_s": statistics.median(head["ttft_s"] for head in heads),
            "collective_fraction": statistics.median(shares),
            "us_per_token": {p: s * 1e6 for p, s in phases.items()},
            "waited_for_s": waited,
            "collectives_per_token": heads[0]["collectives_per_token"],
            "bytes_per_token": heads[0]["bytes_per_token"],
            "expected_bytes_per_token": heads[0]["expected_bytes_per_token"],
            "all_tokens_per_s": rates,
        }


def _hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    while line := process.stdout.readline():
        with contextlib.suppress(json.JSONDecodeError):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError(f"a rank ended with exit code {process.wait(10)}; its messages are above")


@contextlib.contextmanager
def started(options: argparse.Namespace) -> Iterator[list[Contender]]:
    """All contenders, their weights loaded."""
    cores: list[int | None] = sorted(os.sched_getaffinity(0))
    argv = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--worker"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        lone = subprocess.Popen(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
        contenders = [Contender("1 rank, 1 core", [lone], cores)]
        stack.callback(_end, contenders)
        hosts = stack.enter_context(_hosts(options))
        label = f"{options.ranks} ranks, {_words(options)}"
        if hosts is None:
            port = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(20000 + os.getpid() % 10000),
                "WORLD_SIZE": str(options.ranks),
            }
            env = {**os.environ, **port, "OMP_NUM_THREADS": "1"}
            ranks = [subprocess.Popen(argv, env={**env, "RANK": str(r)}, **pipes) for r in range(options.ranks)]
        else:
            ranks = start_ranks(hosts, argv, options.ranks, **pipes)
        contenders.append(Contender(label, ranks, [cores[r % len(cores)] for r in range(options.ranks)]))
        for contender in contenders:
            contender.wait_ready()
        yield contenders


def _end(contenders: Sequence[Contender]) -> None:
    for contender in contenders:
        for process in contender.processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
    until = time.monotonic() + 10
    for contender in contenders:
        for process in contender.processes:
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
    return (
        Switch(options.ranks, [options.mbit] * options.ranks) if options.mbit is not None else contextlib.nullcontext()
    )


def _words(options: argparse.Namespace) -> str:
    if options.delay_us is not None:
        return f"{options.mbit or 1000:g} Mbit/s and {options.delay_us:g} us each way"
    return f"{options.mbit:g} Mbit/s switch" if options.mbit is not None else f"loopback {options.transport}"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as text, each compared with the first."""
    lines = [f"{'':<44} {'tokens/s':>9} {'':>6} {'fastest':>9} {'':>6} {'ttft':>7} {'collective':>10}  waited for"]
    lines.append(
        f"{'':<44} {'median':>9} {'':>6} {'decile':>9} {'':>6} {'(s)':>7} {'(%)':>10}  (s, all ranks and rounds)"
    )
    first = rows[0]
    for row in rows:
        ratios = [f"{row[key] / first[key]:.2f}x" for key in ("tokens_per_s", "fastest_decile")]
        waited = (
            ", ".join(f"rank {peer} {s:.2f}" for peer, s in sorted(row["waited_for_s"].items(), key=lambda kv: -kv[1]))
            or "-"
        )
        cells = f"{row['tokens_per_s']:>9.2f} {ratios[0]:>6} {row['fastest_decile']:>9.2f} {ratios[1]:>6} "
        cells += f"{row['ttft_s']:>7.3f}"
        lines.append(f"{row['label']:<44} {cells} {100 * row['collective_fraction']:>10.1f}  {waited}")
        us = ", ".join(f"{phase} {s:.0f}" for phase, s in row["us_per_token"].items() if s)
        lines.append(f"{'':<44} us per token: {us}")
    return lines


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file or a Hugging Face directory; the bundled model when not given")
    parser.add_argument("--prompt", default="Tell me about the sea.")
    parser.add_argument("--tokens", type=int, default=48, help="per generation")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--dtypes", default="float32", help="one for all, or one per rank; the lone rank takes the first"
    )
    parser.add_argument("--topology", default="auto")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--mbit", type=float, help="ranks in namespaces on a switch, with this rate")
    parser.add_argument("--delay-us", type=float, help="two ranks in namespaces, this far apart each way")
    parser.add_argument("--json", help="write all figures to a file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if options.model is None:
        import hostring.integrations.llm as llm

        options.model = str(Path(llm.__file__).parent / "tiny")
    if options.worker:
        work(options)
        return 0
    with started(options) as contenders:
        for number in range(-1, options.rounds):  # the first is not counted: caches are cold
            for contender in contenders:
                contender.round(max(0, number))
            if number < 0:
                for contender in contenders:
                    contender.results.clear()
            else:
                seen = ", ".join(f"{c.label}: {c.results[-1][0]['decode_tokens_per_s']:.2f}" for c in contenders)
                print(f"round {number + 1} of {options.rounds}: tokens/s {seen}", file=sys.stderr, flush=True)
    rows = [contender.row() for contender in contenders]
    print("\n".join(table(rows)))
    if options.json:
        Path(options.json).write_text(
            json.dumps({"settings": {**vars(options), "json": None}, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    texts = {tuple(rank["tokens"]) for c in contenders for ranks in c.results for rank in ranks}
    exact = set(options.dtypes.split(",")) == {"float32"}
    print(f"tokens: {'the same everywhere' if len(texts) == 1 else f'{len(texts)} different answers'}")
    return 1 if exact and len(texts) != 1 else 0


if __name__ == "__main__":
    sys.exit(main())
