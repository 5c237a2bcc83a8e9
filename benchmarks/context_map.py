#!/usr/bin/env python3
"""Time per decoded token on one node, two ranks by tensors, and two stages, over contexts: measured beside predicted.

    python benchmarks/context_map.py MODEL.gguf --mbit 1000 --contexts 500,2000,5000

Needs root: two ranks in network namespaces, joined by a switch of that rate. The ranks are probed first, as by
`hostring plan model --ranks live --context L`, whose predictions stand beside what the same ranks then take.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from links import Switch, start_ranks, wait_ranks
from rich.console import Console
from rich.table import Table

PLANS = {"one node": "one node", "tp=2": "even", "pp=2": "pp=2"}
TEXT = "The keeper of the lighthouse wrote down every ship that passed, its colour, its flag and the hour. "


def worker(options: argparse.Namespace) -> None:
    """One rank. The head writes what was predicted and measured to `--result`."""
    import torch

    import hostring
    from hostring.integrations.llm import Sampling, load_model
    from hostring.integrations.llm.checkpoint.weights import open_checkpoint
    from hostring.integrations.llm.pipeline.stages import stage_plan
    from hostring.integrations.llm.planning.ask import asked_after
    from hostring.integrations.llm.planning.live import plan_live
    from hostring.integrations.llm.planning.prices import ways

    torch.set_num_threads(1)
    contexts = [int(word) for word in options.contexts.split(",")]
    found: list[dict[str, Any]] = []
    with hostring.init(timeout=600.0) as comm, hostring.init(0, 1) as alone:
        choice = plan_live(comm, options.model, keep_all=True)
        predicted = {n: {way.name: way.seconds for way in ways(asked_after(choice, n))} for n in contexts}
        config = open_checkpoint(options.model).config
        for name, words in PLANS.items():
            comm.barrier()
            if name == "one node" and comm.rank:
                continue
            plan = stage_plan(words, config, comm.world_size) if words.startswith("pp") else None
            group = alone if name == "one node" else comm
            model = load_model(options.model, group, plan=plan, max_seq=max(contexts) + options.tokens + 8)
            model.tokenizer.eos_ids = frozenset()
            ids = model.tokenizer.encode(TEXT)
            for n in contexts:
                stats = model.generate((ids * n)[:n], Sampling(), max_tokens=options.tokens).stats
                one = {"plan": name, "context": n, "measured": 1 / stats.decode_tokens_per_s}
                found.append({**one, "predicted": predicted[n].get(name)})
        if comm.rank == 0:
            Path(options.result).write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--contexts", default="500,2000,5000")
    parser.add_argument("--tokens", type=int, default=16, help="decoded after each context")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--result", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as folder, Switch(2, [options.mbit] * 2, burst=70000) as hosts:
        result = Path(folder) / "result.json"
        argv = [sys.executable, __file__, *sys.argv[1:], "--result", str(result)]
        wait_ranks(start_ranks(hosts, argv, 2, pin=True), options.timeout)
        found = json.loads(result.read_text(encoding="utf-8"))
    table = Table("context", *(f"{name}, {what}" for name in PLANS for what in ("measured", "predicted")))
    for n in dict.fromkeys(one["context"] for one in found):
        row = [one for one in found if one["context"] == n]
        cells = [f"{1e3 * s:.1f} ms" if s else "none" for one in row for s in (one["measured"], one["predicted"])]
        table.add_row(str(n), *cells)
    Console(width=120).print(f"milliseconds per decoded token, {options.mbit:g} Mbit/s", table)


if __name__ == "__main__":
    main()
