"""Mixtures of experts on 1, 2 and 3 ranks: the logits of `transformers`, one choice of experts on all ranks, and the
bits of a serial control."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoint_models import TOKENS, close, edit
from expert_models import CONFIGS, exact_part, expert_model, last_two, wanted
from gguf import GGMLQuantizationType as Kind
from llm_models import write_gguf

import hostring
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.model.routing import Routes
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.planning.choose import choose
from hostring.integrations.llm.planning.document import lines
from hostring.integrations.llm.planning.footprint import Way
from hostring.integrations.llm.planning.model_file import read_model_file
from hostring.integrations.llm.planning.placing import placement
from hostring.integrations.llm.planning.plan_file import as_lists, read_plan
from hostring.integrations.llm.planning.ranks import RankSpec, cost_of_stream
from hostring.integrations.llm.planning.wish import plan_of_places

UNEVEN = {2: ShardPlan((2, 1), (17, 7), (40, 27)), 3: ShardPlan((1, 1, 1), (0, 19, 5), (30, 7, 30))}


def stretched(plan: ShardPlan, columns: int) -> ShardPlan:
    """The same for a model with more columns than 24."""
    return ShardPlan(plan.kv_groups, (*plan.columns[:-1], columns - sum(plan.columns[:-1])), plan.vocab)


@pytest.mark.parametrize("kind", CONFIGS)
def test_exact_logits_on_any_number_of_ranks(kind: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    model = expert_model(kind)
    model.save_pretrained(tmp_path)
    want = wanted(model)
    fused = write_gguf(model, tmp_path / "m.gguf", Kind.F32)
    columns = 24 if kind.startswith("qwen") else 56
    for path, world_size, even in ((tmp_path, 1, True), (tmp_path, 2, True), (fused, 2, False), (tmp_path, 3, False)):
        plan = None if even else stretched(UNEVEN[world_size], columns)

        def body(comm: hostring.Comm, path: Path = path, plan: ShardPlan | None = plan) -> torch.Tensor:
            return last_two(exact_part(path, comm, plan=plan), comm)

        assert close(run_ranks(world_size, body)[0], want), (path, world_size, plan)


@pytest.mark.parametrize("kind", CONFIGS)
def test_experts_placed_whole_give_the_same_logits(
    kind: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    model = expert_model(kind)
    model.save_pretrained(tmp_path)
    want = wanted(model)

    def body(comm: hostring.Comm) -> tuple[torch.Tensor, int]:
        config = open_checkpoint(tmp_path).config
        part = exact_part(tmp_path, comm, plan=ShardPlan.placed(config, comm.world_size))
        return last_two(part, comm), len(part.decoder.layers[0].mlp.experts)

    (found, _), *others = ranks = run_ranks(3, body)
    assert close(found, want)
    assert [n for _, n in ranks] == ([2, 1, 1] if kind == "mixtral" else [3, 3, 2])
    assert others


def test_a_plan_that_places_experts_says_so_and_is_refused_for_others(tmp_path: Path) -> None:
    expert_model("qwen3_moe").save_pretrained(tmp_path)
    plan = plan_of_places(tmp_path, 3)
    assert plan.as_json()["experts"] == [3, 3, 2]
    assert ShardPlan(*as_lists(plan.plan)) == plan.plan
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan.as_json()), encoding="utf-8")
    assert read_plan(saved, read_model_file(tmp_path).config).plan == plan.plan
    dense = replace(read_model_file(tmp_path).config, experts=None)
    with pytest.raises(ValueError, match="has no experts to place"):
        ShardPlan.placed(dense, 2)
    with pytest.raises(ValueError, match="places 8 experts; the model has 0"):
        plan.plan.check(dense)


def test_placing_is_priced_beside_cutting(tmp_path: Path) -> None:
    expert_model("qwen3_moe").save_pretrained(tmp_path)
    model = read_model_file(tmp_path)
    specs = [RankSpec(name, Way(), name, 10**9, decode=cost_of_stream(model, Way(), 1e9)) for name in "ab"]
    choice = choose(model, specs, leave_out=False)
    found = placement(choice)
    assert found is not None
    # 3 of 8 experts, 4 on each rank: 2 on one of them in 6 of 7 cases (48 of 56), otherwise 3
    assert found.most_used == pytest.approx(2 * 48 / 56 + 3 * 8 / 56)
    assert found.placed_s > found.cut_s
    assert any("experts=place" in line for line in lines(choice))


def test_8_of_256_experts_are_added_up(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    model = expert_model("qwen3_moe", num_experts=256, num_experts_per_tok=8, moe_intermediate_size=4)
    model.save_pretrained(tmp_path)
    found = run_ranks(2, lambda comm: last_two(exact_part(tmp_path, comm), comm))[0]
    assert close(found, wanted(model))


def test_ranks_of_other_dtypes_take_part(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    model = expert_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    want = wanted(model)
    found = run_ranks(3, lambda comm: last_two(exact_part(tmp_path, comm, dtype=dtypes[comm.rank]), comm))[0]
    assert (found - want).norm() / want.norm() < 0.02


def test_rows_of_several_sequences_take_their_own_experts(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    expert_model("qwen2_moe").save_pretrained(tmp_path)
    texts = [TOKENS[0, :7].tolist(), TOKENS[0, 7:9].tolist(), TOKENS[0, 9:10].tolist()]

    @torch.inference_mode()
    def body(comm: hostring.Comm) -> tuple[torch.Tensor, torch.Tensor]:
        part = exact_part(tmp_path, comm)
        together = part.step_rows([(part.new_cache(), ids) for ids in texts]).clone()
        return together, torch.cat([part.step(torch.tensor([ids]), part.new_cache()).clone() for ids in texts])

    for together, alone in run_ranks(2, body):
        assert close(together, alone)


def near_ties(model: Any, tmp_path: Path) -> None:
    """Scores of all experts of even numbers, and of odd ones, differ by roundings; those of 1 and 7 not at all."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            for n in range(2, 8):
                weight[n] = weight[n % 2] * (1 + 1e-7 * torch.randn(weight.shape[1], generator=generator))
            weight[7] = weight[1]
    model.save_pretrained(tmp_path)


def test_a_near_tie_picks_the_same_experts_on_all_ranks(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    near_ties(expert_model("qwen3_moe"), tmp_path)

    def body(comm: hostring.Comm) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        part, chosen, alone = exact_part(tmp_path, comm), [], []
        noise = torch.Generator().manual_seed(comm.rank)

        def other_library(norm: Any, inputs: Any, x: torch.Tensor) -> torch.Tensor:
            """The norm as another machine may round it."""
            return x * (1 + 1e-7 * torch.randn(x.shape, generator=noise))

        def note(router: Any, inputs: Any, routes: Routes) -> None:
            chosen.append(routes.experts)
            alone.append(F.linear(inputs[1].flatten(0, -2), router.weight).topk(3).indices.sort(-1).values)

        for layer in part.decoder.layers:
            layer.post_norm.register_forward_hook(other_library)
            layer.mlp.router.register_forward_hook(note)
        last_two(part, comm)
        return chosen, alone

    (first, raw), *others = run_ranks(3, body)
    assert len(first) == 4  # two layers, as rows of a prompt and as a single row
    for chosen, _ in others:
        assert all(torch.equal(a, b) for a, b in zip(first, chosen, strict=True))
    assert any(not torch.equal(a, b) for _, alone in others for a, b in zip(raw, alone, strict=True)), "no near tie"
    rows = torch.cat(first)
    assert not ((rows == 7).any(-1) & ~(rows == 1).any(-1)).any(), "an exact tie goes to the lower number"


class Serial:
    """Folds the ranks' sums in rank order, in one process and without hostring."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.order, self.brought = world_size, "rank", [np.empty(0)] * world_size
        self._barrier = threading.Barrier(world_size, timeout=30)

    def of(self, rank: int) -> Any:
        return _OfRank(self, rank)

    def all_reduce(self, rank: int, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.brought[rank] = x.copy()
        self._barrier.wait()
        total = self.brought[0].copy()
        for term in self.brought[1:]:
            total += term
        x[...] = total
        self._barrier.wait()
        return x


class _OfRank:
    def __init__(self, serial: Serial, rank: int) -> None:
        self._serial, self.rank, self.world_size, self.order = serial, rank, serial.world_size, "rank"

    def all_reduce(self, x: Any, /) -> Any:
        return self._serial.all_reduce(self.rank, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen2_moe", "olmoe"])
def test_ranks_have_the_bits_of_a_serial_control(
    kind: str, dtype: torch.dtype, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    expert_model(kind).save_pretrained(tmp_path)

    @torch.inference_mode()
    def logits(comm: Any) -> torch.Tensor:
        part = exact_part(tmp_path, comm, dtype=dtype)
        cache = part.new_cache()
        return torch.cat([part.step(TOKENS[:, :-1], cache).clone(), part.step(TOKENS[:, -1:], cache)])

    found = run_ranks(3, logits)
    serial = Serial(3)
    control: list[Any] = [None] * 3

    def run(rank: int) -> None:
        control[rank] = logits(serial.of(rank))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(a, b) for a, b in zip(found, control, strict=True))


def test_a_plan_holds_all_experts_and_reads_those_that_a_token_uses(tmp_path: Path) -> None:
    model = expert_model("qwen2_moe")
    model.save_pretrained(tmp_path)
    found = [read_model_file(path) for path in (tmp_path, write_gguf(model, tmp_path / "m.gguf", Kind.F32))]
    one, shared = 3 * 48 * 24, 3 * 48 * 48
    for header in found:
        assert header.mlp_in.elements + header.mlp_out.elements == 2 * (8 * one + shared)  # two layers
        assert header.read_share == (3 * one + shared) / (8 * one + shared)
        assert header.nbytes == 4 * sum(p.numel() for p in model.parameters())
    ranks = [RankSpec("a", Way(), "a", 10**9), RankSpec("b", Way(), "b", 10**9)]
    plan = choose(found[0], ranks).solution.plan
    assert sum(plan.columns) == 24


REFUSED_KEYS: dict[str, Any] = {
    "expert_gating_func": 2,
    "expert_weights_norm": False,
    "expert_feed_forward_length": 23,
    "expert_group_count": 2,
    "leading_dense_block_count": 1,
}


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_other_experts_in_gguf_files_are_refused_by_name(key: str, tmp_path: Path) -> None:
    arch_key, value = f"qwen3moe.{key}", REFUSED_KEYS[key]

    def change(writer: Any) -> None:
        for part in writer.kv_data:
            part.pop(arch_key, None)
        writer.add_bool(arch_key, value) if isinstance(value, bool) else writer.add_uint32(arch_key, value)

    path = write_gguf(expert_model("qwen3_moe"), tmp_path / "m.gguf", Kind.F32, change=change)
    with pytest.raises(ValueError, match=f"qwen3moe.{key} is"):
        open_checkpoint(path)


@pytest.mark.parametrize(("field", "value"), [("decoder_sparse_step", 2), ("mlp_only_layers", [0])])
def test_layers_without_experts_are_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    expert_model("qwen3_moe").save_pretrained(tmp_path)
    edit(tmp_path, **{field: value})
    with pytest.raises(ValueError, match=f"{field} is"):
        open_checkpoint(tmp_path)
