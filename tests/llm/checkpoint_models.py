"""Tiny random checkpoints whose every field can be changed, and their logits here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hostring
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.sharded import build

KINDS = {
    "qwen3": transformers.Qwen3Config,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "smollm3": transformers.SmolLM3Config,
}
BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOKENS = torch.randint(0, 67, (1, 20), generator=torch.Generator().manual_seed(4))


def random_model(config: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
    return model


@pytest.fixture
def alone() -> Iterator[hostring.Comm]:
    with hostring.init(0, 1) as comm:
        yield comm


@torch.inference_mode()
def ours(path: Path, comm: hostring.Comm) -> torch.Tensor:
    logits: torch.Tensor = build(open_checkpoint(path), comm, max_seq=64).decoder(TOKENS)
    return logits


def outcome(path: Path, comm: hostring.Comm) -> torch.Tensor | str:
    """Logits, or why there are none."""
    try:
        return ours(path, comm)
    except ValueError as exc:
        return str(exc)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got - want).abs().max() <= 40 * torch.finfo(torch.float32).eps * want.abs().max())


def edit(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **fields}), encoding="utf-8")


def small(kind: str, **change: Any) -> Any:
    return random_model(KINDS[kind](**{**BASE, **change}))
