#!/usr/bin/env python3
"""Is it faster to let another machine compute the prompt? Time to first token on a slow rank, alone and with help.

    python benchmarks/prefill_elsewhere.py MODEL --lengths 512,2048 --quotas 25,100 --mbit 1000

Two hosts in network namespaces on a switch with the given rate; each rank in a cgroup that may use so many percent of
one core. Rank 0 is the slow one: it holds the conversation and decodes. Rank 1 computes prompts and hands keys and
values over. The slow rank alone reads the same prompts under the same quota. On a machine that does other work too,
quotas of a few percent keep their ratio: `--quotas 4,16`. Needs root and a cgroup hierarchy with the cpu controller
that it may write to; ends only the processes that it has started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from typing import Any

from links import Switch, start_ranks
from planned_quotas import Quota

TOLD = "--rank-of"
PLANS = ("alone", "prefill=1,decode=0")


def rank_main(told: dict[str, Any]) -> None:
    """What a rank runs: it loads and computes a short prompt before the quota counts, and then each prompt once."""
    import torch

    import hostring
    from hostring.integrations.llm import load_model
    from hostring.integrations.llm.handover.roles import roles

    torch.set_num_threads(1)
    with hostring.init(timeout=told["timeout"]) as comm:
        plan = roles(told["plan"]) if told["plan"] != "alone" else None
        model = load_model(told["model"], comm, plan=plan, compute=told["compute"], max_seq=max(told["lengths"]) + 64)
        model.generate(list(range(1000, 1008)), max_tokens=4)
        print("ready", flush=True)
        sys.stdin.readline()
        for length in told["lengths"]:
            ids = [1000 + (7919 * n) % 20000 for n in range(length)]
            found = model.generate(ids, max_tokens=told["max_tokens"])
            said = {"length": length, "tokens": found.tokens, **found.stats.as_dict()}
            print(json.dumps(said), flush=True)


def run(options: argparse.Namespace, plan: str) -> list[list[dict[str, Any]]]:
    """Figures of each prompt, by rank."""
    quotas = options.quotas if plan != "alone" else options.quotas[:1]
    told = {"plan": plan, "model": options.model, "lengths": options.lengths, "max_tokens": options.max_tokens}
    told |= {"timeout": options.timeout, "compute": options.compute}
    command = [sys.executable, __file__, TOLD, json.dumps(told)]
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Switch(2, [options.mbit] * 2))
        groups = [Quota(str(rank)) for rank in range(len(quotas))]
        for group in groups:
            stack.callback(group.remove)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
        ranks = start_ranks(hosts, command, len(quotas), **pipes)
        for process in ranks:
            stack.callback(process.wait)
            stack.callback(process.kill)
        for process, group, percent in zip(ranks, groups, quotas, strict=True):
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a rank did not start; its own error stands above")
            group.limit(process.pid, percent)
        for process in ranks:
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.communicate(timeout=options.timeout)[0] for process in ranks]
    return [[json.loads(line) for line in text.splitlines()] for text in said]


def report(options: argparse.Namespace, alone: list[dict[str, Any]], ranks: list[list[dict[str, Any]]]) -> None:
    slow, fast = options.quotas
    for before, here, there in zip(alone, ranks[0], ranks[1], strict=True):
        handed = there["handover"]
        same = "the same text" if before["tokens"] == here["tokens"] else "ANOTHER TEXT"
        print(
            f"{before['length']} tokens over {options.mbit:g} Mbit/s, {slow:g} % of a core: first token after "
            f"{before['ttft_s']:.2f} s alone, {here['ttft_s']:.2f} s with {fast:g} % of a core elsewhere: "
            f"{before['ttft_s'] / here['ttft_s']:.2f} times as fast, {same}. {handed['kv_bytes'] / 1e6:.1f} MB of keys "
            f"and values under way for {handed['transfer_s']:.2f} s, {handed['hidden_s']:.2f} of them hidden, "
            f"{handed['exposed_s']:.2f} exposed; {1e3 * handed['hash_s']:.0f} ms to hash",
            flush=True,
        )


def main() -> None:
    if sys.argv[1:2] == [TOLD]:
        rank_main(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="512,2048", help="tokens of the prompts")
    parser.add_argument("--quotas", default="25,100", help="percent of one core: of the slow rank, and of the other")
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=1200.0)
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    options.lengths = [int(word) for word in options.lengths.split(",")]
    options.quotas = [float(word) for word in options.quotas.split(",")]
    found = {plan: run(options, plan) for plan in PLANS}
    report(options, found["alone"][0], found[PLANS[1]])
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
