"""Guessed tokens over a slow link: tokens per round trip, and tokens per second with and without. Needs root and gcc.

    python benchmarks/speculative.py MODEL.gguf --one-way-ms 50 --plan pp=2
    python benchmarks/speculative.py MODEL.gguf --draft SMALLER.gguf

Two ranks in network namespaces, joined by a relay that delays packets (links.py). Each text is written several times by
the same processes, in turn without guesses and with them; the medians and the best are shown. One text repeats itself,
the other does not. Both must be the same with guesses and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from links import Delayed, start_ranks, wait_ranks

REPEATING = (
    "Write this list four times, exactly as it is: alpha, beta, gamma, delta, epsilon, zeta, eta, theta, iota, kappa, "
    "lambda, mu."
)
OTHER = "Tell me a story about a lighthouse keeper who finds an unusual map."


def worker(options: argparse.Namespace) -> None:
    """One rank. The head writes what it measured to `--result`."""
    import torch

    import hostring
    from hostring.integrations.llm import Sampling, load_model
    from hostring.integrations.llm.checkpoint.weights import open_checkpoint
    from hostring.integrations.llm.pipeline.stages import stage_plan
    from hostring.integrations.llm.speculation.wish import Speculation

    torch.set_num_threads(1)
    with hostring.init(timeout=600.0) as comm:
        config = open_checkpoint(options.model).config
        plan = stage_plan(options.plan, config, comm.world_size) if options.plan.startswith("pp") else None
        model = load_model(options.model, comm, plan=plan, max_seq=1024)
        model.tokenizer.eos_ids = frozenset()
        wishes = {"off": Speculation(), "lookup": Speculation("lookup")}
        if options.draft:
            wishes["draft"] = Speculation(draft=options.draft)
        speculators = {}
        for name, wish in wishes.items():
            model.speculate(wish)
            speculators[name], model.speculator = model.speculator, None
        found: list[dict[str, Any]] = []
        model.generate("Warm up.", max_tokens=4)
        for text, prompt in (("repeating", REPEATING), ("other", OTHER)):
            sampling = Sampling() if text == "repeating" else Sampling(1.0, top_p=0.98, seed=5)
            for turn in range(options.rounds):
                for name in wishes:
                    model.speculator = speculators[name]
                    one = model.generate(prompt, sampling, max_tokens=options.tokens)
                    stats = one.stats
                    about = {"text": text, "turn": turn, "with": name, "tokens": one.tokens, "words": one.text}
                    found.append(
                        {**about, "tokens_per_s": stats.decode_tokens_per_s, "per_step": stats.tokens_per_step}
                    )
        if comm.rank == 0:
            Path(options.result).write_text(json.dumps(found), encoding="utf-8")


def show(found: list[dict[str, Any]]) -> bool:
    """Print a table. Returns whether all texts are the same with guesses and without."""
    same = True
    heads = (f"{'tokens/s median':>16}", f"{'best':>7}", f"{'to off':>7}", f"{'tokens per round trip':>22}")
    print(f"{'text':10} {'with':7} {' '.join(heads)}  same text")
    for text in dict.fromkeys(one["text"] for one in found):
        off = [one for one in found if one["text"] == text and one["with"] == "off"]
        base = statistics.median(one["tokens_per_s"] for one in off)
        for name in dict.fromkeys(one["with"] for one in found):
            runs = [one for one in found if one["text"] == text and one["with"] == name]
            rates = [one["tokens_per_s"] for one in runs]
            alike = all(one["tokens"] == off[0]["tokens"] for one in runs)
            same = same and alike
            steps = statistics.median(one["per_step"] for one in runs)
            middle = statistics.median(rates)
            print(
                f"{text:10} {name:7} {middle:16.2f} {max(rates):7.2f} {middle / base:7.3f} {steps:22.2f}  "
                f"{'yes' if alike else 'NO'}"
            )
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="", help="a smaller model of the same vocabulary")
    parser.add_argument("--plan", default="pp=2", help="pp=2, or even")
    parser.add_argument("--one-way-ms", type=float, default=50.0)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for everything")
    parser.add_argument("--result", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as folder, Delayed(1000 * options.one_way_ms, options.mbit) as hosts:
        result = Path(folder) / "result.json"
        argv = [sys.executable, __file__, *sys.argv[1:], "--result", str(result)]
        wait_ranks(start_ranks(hosts, argv, 2, pin=True), options.timeout)
        found = json.loads(result.read_text(encoding="utf-8"))
    print(f"{options.one_way_ms:g} ms each way, {options.mbit:g} Mbit/s, plan {options.plan}, {options.tokens} tokens")
    if not show(found):
        sys.exit("a text is another one with guesses")


if __name__ == "__main__":
    main()
