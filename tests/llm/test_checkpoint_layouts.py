"""Layouts of Qwen3, Qwen2, Llama, Mistral and SmolLM3 on 1, 2, 3 and 5 ranks, as HF directories and as GGUF files: the
logits of `transformers`. KV heads don't divide by the ranks, and may be fewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import KINDS, TOKENS, close, small
from gguf import GGMLQuantizationType as Kind
from llm_models import write_gguf

import hostring
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.model.tensor_parallel import gather_logits
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.packed.model import build_packed
from hostring.integrations.llm.sharded import build

HEADS = {1: 4, 2: 6, 3: 6, 8: 8}  # KV heads, and the query heads that read them
MORE: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "smollm3": {"num_hidden_layers": 4, "tie_word_embeddings": True},  # the last layer has no rotary positions
}


def model_with(kind: str, kv_heads: int) -> Any:
    sizes = {"num_attention_heads": HEADS[kv_heads], "num_key_value_heads": kv_heads, "head_dim": 8}
    return small(kind, **{"tie_word_embeddings": kind == "qwen3", **sizes, **MORE.get(kind, {})})


@torch.inference_mode()
def wanted(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(TOKENS).logits[0, -2:]
    return logits


@torch.inference_mode()
def last_two(part: Any, comm: hostring.Comm) -> torch.Tensor:
    """Logits of the last two positions: one as the end of a prompt, one as a single token."""
    cache = part.new_cache()
    rows = [part.step(TOKENS[:, :-1], cache), part.step(TOKENS[:, -1:], cache)]
    whole = [gather_logits(comm, row, part.plan) for row in rows]
    return torch.cat([torch.from_numpy(row) for row in whole if row is not None] or [torch.empty(0)])


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_logits_on_any_number_of_ranks(
    kind: str, kv_heads: int, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    model = model_with(kind, kv_heads)
    model.save_pretrained(tmp_path)
    want = wanted(model)
    paths = [tmp_path]
    if kind != "mistral":  # whose GGUF files say "llama"
        paths.append(write_gguf(model, tmp_path / "m.gguf", Kind.F32))
    for path in paths:
        for world_size in [n for n in (1, 2, 3, 5) if n <= HEADS[kv_heads]]:

            def body(comm: hostring.Comm, path: Path = path) -> torch.Tensor:
                return last_two(build(open_checkpoint(path), comm, max_seq=64), comm)

            assert close(run_ranks(world_size, body)[0], want), (path, world_size)


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "smollm3"])
def test_packed_logits_on_any_number_of_ranks(
    kind: str, kv_heads: int, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))
    model = model_with(kind, kv_heads)
    path = write_gguf(model, tmp_path / "m.gguf", Kind.F32)
    want = wanted(model)

    def body(comm: hostring.Comm) -> torch.Tensor:
        return last_two(build_packed(GgufCheckpoint(path), comm, max_seq=64), comm)

    found = [run_ranks(n, body)[0] for n in (1, 2, 3) if n <= kv_heads]
    assert all((one - want).norm() / want.norm() < 0.004 for one in found)  # keys and values are rounded to 16 bits


def test_more_ranks_than_kv_heads_compute_exact_in_every_dtype(
    tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    model = model_with("llama", 2)
    model.save_pretrained(tmp_path)

    def body(comm: hostring.Comm) -> torch.Tensor:
        part = build(open_checkpoint(tmp_path), comm, max_seq=64, dtype=torch.bfloat16)
        assert part.plan.heads == (2, 1, 2, 1)
        return last_two(part, comm)

    want = wanted(model)
    assert (run_ranks(4, body)[0] - want).norm() / want.norm() < 0.03
