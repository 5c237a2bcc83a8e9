"""Mixtures of experts on 1, 2 and 3 ranks: the logits of `transformers`, one choice of experts on all ranks, and the
bits of a serial control."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoint_models import TOKENS, close
from expert_models import CONFIGS, exact_part, expert_model, last_two, wanted

import hostring
from hostring.integrations.llm.model.routing import Routes
from hostring.integrations.llm.model.shards import ShardPlan

UNEVEN = {2: ShardPlan((2, 1), (17, 7), (40, 27)), 3: ShardPlan((1, 1, 1), (0, 19, 5), (30, 7, 30))}


def stretched(plan: ShardPlan, columns: int) -> ShardPlan:
    """The same for a model with more columns than 24."""
    return ShardPlan(plan.kv_groups, (*plan.columns[:-1], columns - sum(plan.columns[:-1])), plan.vocab)


@pytest.mark.parametrize("kind", CONFIGS)
def test_exact_logits_on_any_number_of_ranks(kind: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    model = expert_model(kind)
    model.save_pretrained(tmp_path)
    want = wanted(model)
    columns = 24 if kind.startswith("qwen") else 56
    for world_size in (1, 2, 3):
        plans = [None, *([stretched(UNEVEN[world_size], columns)] if world_size > 1 else [])]
        for plan in plans:

            def body(comm: hostring.Comm, plan: ShardPlan | None = plan) -> torch.Tensor:
                return last_two(exact_part(tmp_path, comm, plan=plan), comm)

            assert close(run_ranks(world_size, body)[0], want), (world_size, plan)


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
