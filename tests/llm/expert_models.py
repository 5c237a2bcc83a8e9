"""Tiny random mixtures of experts of `transformers`, their logits, and the logits of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoint_models import BASE, TOKENS, random_model

import hostring
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.tensor_parallel import gather_logits
from hostring.integrations.llm.sharded import build

SHAPES: dict[str, Any] = {**BASE, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
OWN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, {**OWN, "norm_topk_prob": True}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, {**OWN, "shared_expert_intermediate_size": 48}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3}),
}


def expert_model(kind: str, **change: Any) -> Any:
    config, own = CONFIGS[kind]
    return random_model(config(**{**SHAPES, **own, **change}))


@torch.inference_mode()
def wanted(model: Any) -> torch.Tensor:
    """Logits of the last two positions."""
    logits: torch.Tensor = model(TOKENS).logits[0, -2:]
    return logits


@torch.inference_mode()
def last_two(part: LocalModel, comm: hostring.Comm) -> torch.Tensor:
    """Logits of the last two positions: one as the end of a prompt, one as a single token."""
    cache = part.new_cache()
    rows = [part.step(TOKENS[:, :-1], cache), part.step(TOKENS[:, -1:], cache)]
    whole = [gather_logits(comm, row, part.plan) for row in rows]
    return torch.cat([torch.from_numpy(row) for row in whole if row is not None] or [torch.empty(0)])


def exact_part(path: Path, comm: hostring.Comm, **options: Any) -> LocalModel:
    return build(open_checkpoint(path), comm, max_seq=64, **options)
