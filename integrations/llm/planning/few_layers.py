"""A part of a model with few layers, alone and timed region by region: what probes and benchmarks run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.compute import build_local
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.planning.footprint import ITEM_NBYTES, Way
from hostring.integrations.llm.planning.limits import busy_clock
from hostring.integrations.llm.planning.model_file import Matrices, ModelFile
from hostring.integrations.llm.sharded import DTYPES

MAX_POSITIONS = 512

Sizes = tuple[int, int, int]  # KV-head groups, FFN columns, vocabulary rows
Seconds = tuple[float, float, float]  # of attention and MLP in one layer, and of the head


class Stopwatch:
    """Stands in for the group of a part of the model: adds nothing, and notes the time of every reduction.

    Args:
        clock: what counts: a processor's time does not go on while a rank is stopped.
    """

    def __init__(self, world_size: int, clock: Callable[[], float] = perf_counter) -> None:
        self.rank, self.world_size, self.order = 0, world_size, "rank"
        self.spans: list[float] = []
        self._clock, self._since = clock, 0.0

    def begin(self) -> None:
        self.spans, self._since = [], self._clock()

    def all_reduce(self, x: Any, /) -> Any:
        if isinstance(x, torch.Tensor) and not x.is_cpu:
            x.cpu()  # as a group's staging does: waits for what computes it
        self._stamp()
        return x

    def end(self, logits: torch.Tensor) -> list[float]:
        """Seconds of each region, and of the head."""
        logits.cpu()
        self._stamp()
        return self.spans

    def _stamp(self) -> None:
        now = self._clock()
        self.spans.append(now - self._since)
        self._since = now


class FewLayers:
    """The first layers of a model, of which this process holds a share, as if it were rank 0.

    Args:
        sizes: of the share. n_layers: how many.
    """

    def __init__(self, path: str | Path, way: Way, device: torch.device, sizes: Sizes, n_layers: int) -> None:
        checkpoint = open_checkpoint(path)
        whole = whole_of(checkpoint.config)
        self.max_seq = min(MAX_POSITIONS, checkpoint.config.max_position_embeddings)
        checkpoint.config = replace(checkpoint.config, num_hidden_layers=n_layers)
        rest = tuple(total - size for total, size in zip(whole, sizes, strict=True))
        plan = ShardPlan(*(zip(sizes, rest, strict=True) if rest[0] else ((size,) for size in whole)))
        self._split_embedding = way.compute == "exact" and rest[2] > 0 and rest[0] > 0
        exact = way.compute == "exact"
        group = plan.world_size if exact else max(2, plan.world_size)  # a packed rank that is alone has no boundaries
        watch: Any = Stopwatch(group, busy_clock(device))
        packed_ranks = [way.compute == "packed"] * plan.world_size
        self._part, _ = build_local(
            checkpoint, watch, way.compute, device, plan=plan, max_seq=self.max_seq, hash_activations=False,
            compile=False, packed_ranks=packed_ranks, dtype=DTYPES[way.dtype],
            replicate_embedding=not self._split_embedding,
        )  # fmt: skip
        self._watch, self._cache = watch, self._part.new_cache()

    def step(self, n_tokens: int) -> list[float]:
        """Feed some tokens. Returns seconds of each region in order, and of the head."""
        if self._cache.length + n_tokens > self.max_seq:
            self.forget()
        tokens = torch.zeros(1, n_tokens, dtype=torch.long, device=self._part.forward.device)
        self._watch.begin()
        spans: list[float] = self._watch.end(self._part.step(tokens, self._cache))
        return spans[1:] if self._split_embedding else spans

    def forget(self) -> None:
        """Begin with an empty cache."""
        self._cache.truncate(0)


def usual_regions(spans: Sequence[float]) -> Seconds:
    """Seconds of attention and of MLP of a usual layer, and of the head."""
    return median(spans[:-1:2]), median(spans[1:-1:2]), spans[-1]


def layer_nbytes(model: ModelFile, way: Way) -> float:
    """Of the matrices of one layer."""
    return sum(_nbytes(model, way)) / model.config.num_hidden_layers


def layer_read_nbytes(model: ModelFile, way: Way) -> float:
    """The same, without the experts that a token doesn't use."""
    attention, mlp = _nbytes(model, way)
    return (attention + model.read_share * mlp) / model.config.num_hidden_layers


def _nbytes(model: ModelFile, way: Way) -> tuple[float, float]:
    def of(*matrices: Matrices) -> float:
        packed = way.compute == "packed"
        return sum(one.nbytes if packed else one.elements * ITEM_NBYTES[way.dtype] for one in matrices)

    return of(model.attention_in, model.attention_out), of(model.mlp_in, model.mlp_out)


def whole_of(config: ModelConfig) -> Sizes:
    return config.num_key_value_heads, config.intermediate_size, config.vocab_size
