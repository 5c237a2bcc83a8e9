#!/usr/bin/env python3
"""What a grid of ranks gains at a long context: the time of a decoded token, one rank against `--plan context=C`.

    python benchmarks/context_attention.py --positions 65536 --context 3

The step of one rank with all positions, and that of one of C ranks with its shard, are measured here on one core, one
after the other: random weights, a few layers of SmolLM2's shape, and the whole vocabulary once. A stand-in gives the
rank of the grid the parts of the others. What it would wait for them is priced by hostring's model of a network, not
measured: one all_to_all and two all-reduces in each layer. So the ratio is a prediction for C machines, each with a
core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from hostring.cost import estimate
from hostring.cost.network import Network, ethernet, in_words, one_host
from hostring.integrations.llm.checkpoint.whole_model import ModuleCheckpoint
from hostring.integrations.llm.context.cache import ContextCache, PositionShard
from hostring.integrations.llm.context.merging import EXTRA, Merging
from hostring.integrations.llm.context.plan import BLOCK_POSITIONS, ContextPlan
from hostring.integrations.llm.model.audit import Clock
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.exact_forward import ExactForward
from hostring.integrations.llm.model.qwen import Decoder
from hostring.integrations.llm.sharded import build


class StandIn:
    """A group whose other ranks bring what this one brings, at once."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size

    def all_reduce(self, x: Any) -> Any:
        return x

    def all_to_all(self, x: Any) -> Any:
        return x


def shape(layers: int, positions: int) -> ModelConfig:
    return ModelConfig(
        49152, 576, 1536, layers, 9, 3, 64, qk_norm=False, max_position_embeddings=positions + 64
    )  # fmt: skip


def one_of(model: Decoder, plan: ContextPlan, positions: int) -> tuple[ExactForward, Any]:
    """The first rank of a grid, and its cache with all positions but the last few taken."""
    group: Any = StandIn(plan.world_size)
    shares = plan.shares(model.config)
    part = build(ModuleCheckpoint(model), group, plan=shares, max_seq=positions + 64)
    forward = part.forward
    assert isinstance(forward, ExactForward)
    if plan.context == 1:
        cache: Any = forward.new_cache(1, positions + 64)
    else:
        forward.one_row = None  # as in a grid
        columns = tuple(shares.o_columns(model.config, rank) for rank in range(plan.context))
        merging = Merging(group, columns, model.config.head_dim, Clock())
        shard = PositionShard(0, plan.context, BLOCK_POSITIONS)
        cache = ContextCache(forward.decoder.config, shard, positions + 64, torch.float32, torch.device("cpu"), merging)
    cache.length = positions - 1
    return forward, cache


def seconds(forward: ExactForward, cache: Any, rounds: int) -> float:
    """Median time of a step at this length."""
    token, taken, found = torch.ones(1, 1, dtype=torch.long), cache.length, []
    for _ in range(rounds + 2):
        begun = perf_counter()
        forward.step(token, cache)
        found.append(perf_counter() - begun)
        cache.truncate(taken)
    return median(found[2:])


def priced(plan: ContextPlan, config: ModelConfig, network: Network) -> float:
    """Seconds of a step's messages between the ranks of the grid."""
    n = plan.world_size
    if n == 1:
        return 0.0
    heads = -(-config.num_attention_heads // plan.heads // plan.context)
    nbytes = 4 * plan.context * heads * (config.head_dim + EXTRA)
    merge = estimate.movement("all_to_all", "mesh", "rank", network, nbytes, 1 << 20).seconds
    variants = ("one_shot", "two_shot")
    sums = (estimate.all_reduce("mesh", v, "rank", network, 4 * config.hidden_size, 1 << 20).seconds for v in variants)
    return config.num_hidden_layers * (merge + 2 * min(sums))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = shape(options.layers, options.positions)
    model = Decoder(config, 64).initialise()
    found: dict[str, Any] = {"positions": options.positions, "context": options.context, "layers": options.layers}
    for name, plan in (("one", ContextPlan(1, 1)), ("grid", ContextPlan(options.context, 1))):
        found[f"{name}_s"] = seconds(*one_of(model, plan, options.positions), options.rounds)
    networks: dict[str, Callable[[int], Network]] = {
        "one_host": lambda n: one_host(n, n),
        "ethernet_10gbit": lambda n: ethernet(n, 10.0),
        "ethernet_1gbit": ethernet,
    }
    for name, make in networks.items():
        network = make(options.context)
        wait = priced(ContextPlan(options.context, 1), config, network)
        found[name] = {"wait_s": wait, "ratio": found["one_s"] / (found["grid_s"] + wait), "is": in_words(network)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=65536)
    parser.add_argument("--context", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options)
    print(f"{options.positions} positions, {options.layers} layers, f32, one core: measured")
    print(f"  one rank with all positions     {1e3 * found['one_s']:8.2f} ms for a token")
    print(f"  one of {options.context} ranks with its shard  {1e3 * found['grid_s']:8.2f} ms")
    print("priced: waiting for the other ranks, and the time of one rank over that of the grid")
    for name in ("one_host", "ethernet_10gbit", "ethernet_1gbit"):
        print(f"  {name:16} {1e3 * found[name]['wait_s']:8.2f} ms  ratio {found[name]['ratio']:.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
