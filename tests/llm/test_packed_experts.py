"""Experts as blocks of a GGUF file: the logits of the dequantised weights, and the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_models import expert_model
from gguf import GGMLQuantizationType as Kind
from llm_models import packable_model, write_gguf

import hostring
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.compute import build_local
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.packed.check import check_experts
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.packed.model import build_packed
from hostring.integrations.llm.pipeline.stages import stage_plan
from hostring.integrations.llm.sharded import build

try:
    load()
except Unavailable as exc:
    pytest.skip(str(exc), allow_module_level=True)

SHAPES: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 96},
    "qwen2_moe": {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 192},
    "mixtral": {"intermediate_size": 96},
}
PROMPT = [int(n) for n in np.random.default_rng(3).integers(0, 60, 21)]
ROUNDED = 0.06  # activations are rounded to blocks of 8 bits in every layer


def written(kind: str, stored: Kind, folder: Path, **shapes: int) -> Path:
    return write_gguf(expert_model(kind, **{**SHAPES, **OWN[kind], **shapes}), folder / f"{kind}.gguf", stored)


def logits(model: LocalModel) -> np.ndarray[Any, Any]:
    """After a prompt, after two single tokens, and after those of two texts together; of the whole vocabulary."""
    first, second = model.new_cache(), model.new_cache()
    steps = [
        [(first, PROMPT)],
        [(first, [7])],
        [(first, [5])],
        [(second, PROMPT[:3])],
        [(first, [9]), (second, [2])],
    ]
    found = []
    for step in steps:
        for row in model.step_rows(step):
            found.append(model.comm.all_gather(np.asarray(row.numpy()).copy(), counts=model.plan.vocab))
    return np.array(found)


def distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("stored", [Kind.Q8_0, Kind.Q4_0, Kind.F16])
@pytest.mark.parametrize("kind", OWN)
def test_any_number_of_ranks_gives_the_logits_of_the_dequantised_weights(
    kind: str, stored: Kind, invariant: bool, tmp_path: Path, run_ranks: Any
) -> None:
    path = written(kind, stored, tmp_path)
    exact = logits(build(GgufCheckpoint(path), hostring.init(0, 1), max_seq=64))

    def run(comm: hostring.Comm) -> np.ndarray[Any, Any]:
        return logits(build_packed(GgufCheckpoint(path), comm, max_seq=64, batch_invariant=invariant))

    alone = run(hostring.init(0, 1))
    assert distance(alone, exact) < ROUNDED
    for world_size in (2, 3):
        for found in run_ranks(world_size, run):
            np.testing.assert_array_equal(found, alone)


def test_five_ranks_give_the_bits_of_one(tmp_path: Path, run_ranks: Any) -> None:
    shapes = {"num_attention_heads": 10, "num_key_value_heads": 5, "moe_intermediate_size": 160}
    path = written("qwen3_moe", Kind.Q8_0, tmp_path, **shapes)

    def run(comm: hostring.Comm) -> np.ndarray[Any, Any]:
        return logits(build_packed(GgufCheckpoint(path), comm, max_seq=64))

    alone = run(hostring.init(0, 1))
    for found in run_ranks(5, run):
        np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("columns", [(96, 0), (0, 32, 64), (32, 0, 64)])
def test_uneven_shares_and_none_give_the_same_bits(columns: tuple[int, ...], tmp_path: Path, run_ranks: Any) -> None:
    path = written("qwen2_moe", Kind.Q4_0, tmp_path)
    groups, vocab = {2: ((1, 2), (50, 0)), 3: ((1, 1, 1), (10, 20, 20))}[len(columns)]
    total = GgufCheckpoint(path).config.vocab_size
    plan = ShardPlan(groups, columns, (total - sum(vocab[1:]), *vocab[1:]))

    def run(comm: hostring.Comm) -> np.ndarray[Any, Any]:
        return logits(build_packed(GgufCheckpoint(path), comm, max_seq=64, plan=plan, threads=2))

    alone = logits(build_packed(GgufCheckpoint(path), hostring.init(0, 1), max_seq=64))
    for found in run_ranks(len(columns), run):
        np.testing.assert_array_equal(found, alone)


def test_a_row_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    """Alone, in a chunk, and beside another text."""
    path = written("qwen3_moe", Kind.Q8_0, tmp_path)
    model = build_packed(GgufCheckpoint(path), hostring.init(0, 1), max_seq=64, batch_invariant=True)
    chunked, single, beside = (model.new_cache() for _ in range(3))
    last = model.step_rows([(chunked, PROMPT)]).clone()
    for token in PROMPT:
        found = model.step_rows([(single, [token])]).clone()
    np.testing.assert_array_equal(found.numpy(), last.numpy())
    for token in PROMPT:
        both = model.step_rows([(model.new_cache(), [3, 4]), (beside, [token])]).clone()
    np.testing.assert_array_equal(both[1:].numpy(), last.numpy())


def test_ranks_that_compute_exact_and_packed_choose_the_same_experts(tmp_path: Path, run_ranks: Any) -> None:
    path = written("mixtral", Kind.Q8_0, tmp_path)
    exact = logits(build(GgufCheckpoint(path), hostring.init(0, 1), max_seq=64))

    def run(comm: hostring.Comm) -> np.ndarray[Any, Any]:
        wish = "packed" if comm.rank == 1 else "exact"
        parts: dict[str, Any] = {"plan": None, "max_seq": 64, "hash_activations": False, "compile": False}
        part, _ = build_local(GgufCheckpoint(path), comm, wish, torch.device("cpu"), **parts)
        return logits(part)

    found = run_ranks(3, run)
    for one in found:
        np.testing.assert_array_equal(one, found[0])
    assert distance(found[0], exact) < ROUNDED


def test_a_stage_of_a_pipeline_may_hold_packed_experts(tmp_path: Path, run_ranks: Any) -> None:
    path = written("qwen3_moe", Kind.Q4_0, tmp_path)

    def run(comm: hostring.Comm) -> list[int]:
        plan = stage_plan("pp=2", GgufCheckpoint(path).config, comm.world_size) if comm.world_size > 1 else None
        parts: dict[str, Any] = {"plan": plan, "max_seq": 64, "hash_activations": False, "compile": False}
        part, packed = build_local(GgufCheckpoint(path), comm, "packed", torch.device("cpu"), **parts)
        assert all(packed)
        cache, tokens = part.new_cache(), []
        step = PROMPT
        for _ in range(6):
            row = part.step(torch.tensor([step]), cache)
            chosen = np.array([int(row[0].argmax()) if row.numel() else -1], np.int32)
            step = [int(comm.all_reduce(chosen, "max")[0])]
            tokens += step
        return tokens

    alone = run(hostring.init(0, 1))
    assert run_ranks(2, run) == [alone, alone]


def test_what_is_not_computed_packed_is_refused_by_name(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"max_seq": 64, "hash_activations": False, "compile": False}
    olmoe = write_gguf(
        expert_model("olmoe", hidden_size=96, head_dim=16, intermediate_size=96), tmp_path / "o.gguf", Kind.Q8_0
    )
    placed = written("mixtral", Kind.Q8_0, tmp_path)
    with hostring.init(0, 1) as comm:
        with pytest.raises(ValueError, match="can't compute packed: norms over all queries"):
            build_local(GgufCheckpoint(olmoe), comm, "packed", torch.device("cpu"), plan=None, **parts)
        plan = ShardPlan.placed(GgufCheckpoint(placed).config, 1)
        with pytest.raises(ValueError, match="can't compute packed: ranks that hold whole experts"):
            build_local(GgufCheckpoint(placed), comm, "packed", torch.device("cpu"), plan=plan, **parts)


def test_a_bias_needs_a_part_of_its_matrix(tmp_path: Path, run_ranks: Any) -> None:
    path = write_gguf(packable_model("llama"), tmp_path / "m.gguf", Kind.Q4_1)
    config = GgufCheckpoint(path).config
    plan = ShardPlan((1, config.num_key_value_heads - 1), (0, config.intermediate_size), (config.vocab_size, 0))

    def run(comm: hostring.Comm) -> str:
        try:
            build_packed(GgufCheckpoint(path), comm, max_seq=64, plan=plan)
        except Unavailable as exc:
            return str(exc)
        return ""

    assert run_ranks(2, run) == [
        "blk.0.ffn_down.bias is added by rank 0, which has no part of that matrix; give it some",
        "",
    ]


def test_products_of_experts_are_tried_before_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, ggml = GgufCheckpoint(written("mixtral", Kind.Q8_0, tmp_path)), load()
    files = [np.frombuffer(mapped, np.uint8) for mapped in checkpoint.mapped]
    check_experts(ggml, files, checkpoint.tensors)
    usual = ggml.mul_mat_id
    monkeypatch.setattr(ggml, "mul_mat_id", lambda ctx, a, b, ids: usual(ctx, a, ggml.rms_norm(ctx, b, 9.0), ids))
    with pytest.raises(Unavailable, match="product of experts in Q8_0 blocks is off"):
        check_experts(ggml, files, checkpoint.tensors)
