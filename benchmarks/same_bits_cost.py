#!/usr/bin/env python3
"""What the promise of the same bits costs: a model with it and without, in turn, by the same ranks.

    OMP_NUM_THREADS=1 hostring launch -n 2 benchmarks/same_bits_cost.py MODEL.gguf

Shown are medians of tokens per second, decoding and reading a prompt, and their ratios.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.launch.cores import pin

PROMPT = "Write a long story about a lighthouse keeper, a storm and a ship."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with hostring.init(transport="tcp") as comm:
        pin(comm.rank, comm.world_size)
        models = {promised: load_model(options.model, comm, same_bits=promised) for promised in (False, True)}
        ids = models[False].prompt_ids(PROMPT)
        ids = (ids * options.prompt_tokens)[: options.prompt_tokens]
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(1 + options.rounds):  # the first is not counted
            for promised, model in models.items():
                stats = model.generate(ids, Sampling(), max_tokens=options.tokens).stats
                found[promised].append((stats.decode_tokens_per_s, stats.prefill_tokens_per_s))
        if comm.rank:
            return
        print(f"{comm.world_size} ranks, {options.prompt_tokens} prompt tokens, {options.tokens} decoded")
        for n, phase in enumerate(("decode", "prefill")):
            plain, same = (median(one[n] for one in found[promised][1:]) for promised in (False, True))
            print(f"{phase:8} plain {plain:7.1f} tokens/s, same bits {same:7.1f}: costs {1 - same / plain:.1%}")


if __name__ == "__main__":
    main()
