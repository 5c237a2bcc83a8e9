"""Pipelines: stages of layers, each a rank or a group of ranks, write what one process writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from llm_models import packable_model, write_gguf

import hostring
from hostring.errors import HostringError
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.compute import build_local
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.pipeline.stages import StagePlan, balanced_layers, stage_plan

PROMPT, TOKENS = "In the beginning", 24
IDS = [5, 17, 3, 250, 9, 9, 101]
CONFIG = open_checkpoint(BUNDLED).config
BOUNDARY_NBYTES = 4 * CONFIG.hidden_size + 64  # the stream of one row, and the header of a message
RunRanks = Callable[..., list[Any]]


def generated(plan: StagePlan, dtypes: tuple[str, ...], comm: hostring.Comm, **options: Any) -> Any:
    dtype = dtypes[comm.rank % len(dtypes)]
    model = load_model(BUNDLED, comm, plan=plan, dtype=dtype, hash_activations=True, **options)
    found = model.generate(PROMPT if comm.rank == 0 else None, Sampling(), max_tokens=TOKENS)
    return found, model.sharded.forward.nbytes_held


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What one process writes, by dtype."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        with hostring.init(0, 1) as comm:
            found[dtype] = load_model(BUNDLED, comm, dtype=dtype).generate(PROMPT, max_tokens=TOKENS).tokens
    return found


@pytest.mark.parametrize(
    ("text", "world_size"),
    [("pp=2", 2), ("pp=3", 3), ("pp=2,layers=1/3", 2), ("pp=2,tp=2", 4), ("pp=3,tp=2,layers=2/1/1", 6)],
)
def test_stages_write_what_one_process_writes(
    text: str, world_size: int, alone: dict[str, list[int]], run_ranks: RunRanks
) -> None:
    plan = stage_plan(text, CONFIG, world_size)
    results = run_ranks(world_size, partial(generated, plan, ("float32",)))
    for rank, (found, _) in enumerate(results):
        stats, stage = found.stats, plan.of_rank(rank)
        shares = len(stage.ranks) > 1 and not stage.is_first  # what the stage before sent
        assert found.tokens == alone["float32"]
        assert stats.wrong_steps == 0
        assert stats.collectives_per_token == stats.expected_collectives_per_token == 2 * len(stage.layers) + 1 + shares
        assert stats.bytes_per_token == stats.expected_bytes_per_token
        assert stats.prefill_bytes == stats.expected_prefill_bytes
        assert stats.boundary_bytes_per_token == (0 if stage.is_last or rank != stage.ranks.start else BOUNDARY_NBYTES)


def test_stages_in_unlike_dtypes_agree_on_the_text(alone: dict[str, list[int]], run_ranks: RunRanks) -> None:
    plan = stage_plan("pp=3", CONFIG, 3)
    results = run_ranks(3, partial(generated, plan, ("bfloat16",)))
    assert [found.tokens for found, _ in results] == [alone["bfloat16"]] * 3
    mixed = run_ranks(3, partial(generated, plan, ("float32", "bfloat16", "float16")))
    assert len({tuple(found.tokens) for found, _ in mixed}) == 1


def test_a_split_embedding_is_added_up_in_the_first_stage_alone(
    alone: dict[str, list[int]], run_ranks: RunRanks
) -> None:
    plan = stage_plan("pp=2,tp=2", CONFIG, 4)
    for found, _ in run_ranks(4, partial(generated, plan, ("float32",), replicate_embedding=False)):
        stats = found.stats
        assert found.tokens == alone["float32"]
        assert stats.collectives_per_token == stats.expected_collectives_per_token == 6  # in the second, the stream
        assert stats.bytes_per_token == stats.expected_bytes_per_token


def test_ranks_of_a_stage_may_share_kv_heads(alone: dict[str, list[int]], run_ranks: RunRanks) -> None:
    """Each of 2 stages has 6 ranks for 5 KV heads."""

    def body(comm: hostring.Comm) -> Any:
        model = load_model(BUNDLED, comm, plan=stage_plan("pp=2,tp=6", CONFIG, 12))
        return model.generate(PROMPT, max_tokens=6).tokens, model.sharded.plan

    for tokens, plan in run_ranks(12, body):
        assert tokens == alone["float32"][:6]
        assert sum(plan.heads) == 2 * CONFIG.num_attention_heads


def test_a_stage_holds_its_layers_and_its_end_of_the_decoder_alone(run_ranks: RunRanks) -> None:
    results = run_ranks(3, partial(generated, stage_plan("pp=3", CONFIG), ("float32",)))
    first, between, last = (nbytes for _, nbytes in results)
    layers = CONFIG.num_hidden_layers
    with hostring.init(0, 1) as comm:
        whole = load_model(BUNDLED, comm).sharded.forward.nbytes_held
    norm, matrix = 4 * CONFIG.hidden_size, 4 * CONFIG.vocab_size * CONFIG.hidden_size
    layer = (whole - norm - matrix - matrix // 2) / layers  # the file's embedding is in 16 bits, and tied to the head
    counts = balanced_layers(CONFIG, 3)
    assert (first, between, last) == (
        counts[0] * layer + norm + matrix // 2,
        counts[1] * layer + norm,
        counts[2] * layer + norm + matrix,
    )


@pytest.mark.parametrize("ways", [("packed", "packed"), ("packed", "exact"), ("exact", "packed")])
def test_packed_stages_beside_exact_ones(ways: tuple[str, ...], tmp_path: Path, run_ranks: RunRanks) -> None:
    """Each stage computes in its own way. The text of packed stages is that of one packed rank."""
    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))
    path = write_gguf(packable_model("qwen3", 1, 64), tmp_path / "small.gguf", Kind.Q4_1)
    plan = stage_plan("pp=2", open_checkpoint(path).config, 2)

    def logits(plan: StagePlan | None, ways: tuple[str, ...], comm: hostring.Comm) -> Any:
        part, packed = build_local(
            open_checkpoint(path), comm, ways[comm.rank], torch.device("cpu"), plan=plan, max_seq=64,
            hash_activations=False, compile=False, dtype=torch.float32,
        )  # fmt: skip
        cache, other = part.new_cache(), part.new_cache()
        part.step(torch.tensor([IDS]), cache)
        part.step(torch.tensor([IDS[:2]]), other)
        both = part.step_rows([(cache, [7]), (other, [9, 3])])  # the longer one is computed first
        return both.clone().numpy(), list(packed)

    (_, first), (found, second) = run_ranks(2, partial(logits, plan, ways))
    assert first == second == [way == "packed" for way in ways]
    ((whole, _),) = run_ranks(1, partial(logits, None, ways[:1]))
    if len(set(ways)) == 1:
        np.testing.assert_array_equal(found, whole)
    else:
        np.testing.assert_allclose(found, whole, atol=0.05 * np.abs(whole).max())


def test_a_lost_stage_is_named(run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> str:
        model = load_model(BUNDLED, comm, plan=stage_plan("pp=3", CONFIG, 3))
        tokens: list[int] = []

        def on_token(token: int) -> None:
            tokens.append(token)
            if comm.rank == 1 and len(tokens) == 3:
                comm.abort("the test ends this rank")

        try:
            model.generate(PROMPT, max_tokens=TOKENS, on_token=on_token)
        except HostringError as exc:
            return str(exc)
        return "no error"

    for rank, error in enumerate(run_ranks(3, body)):
        assert rank == 1 or "rank 1" in error


def test_a_rank_that_is_lost_inside_a_stage_is_named_by_its_number_among_all(run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> tuple[int | None, str]:
        model = load_model(BUNDLED, comm, plan=stage_plan("pp=2,tp=2", CONFIG, 4))
        if comm.rank == 3:
            model.sharded.reducing.abort("the test ends this rank")
        try:
            model.generate(PROMPT, max_tokens=TOKENS)
        except HostringError as exc:
            return exc.rank, str(exc)
        return None, "no error"

    rank, error = run_ranks(4, body)[2]
    assert rank == 3
    assert "in the group of stage 1, whose rank 0 is rank 2" in error


def test_a_step_that_does_not_fit_is_refused_on_every_stage(run_ranks: RunRanks) -> None:
    """At once, and the next step that fits is done."""

    def body(comm: hostring.Comm) -> list[int]:
        part = load_model(BUNDLED, comm, plan=stage_plan("pp=3", CONFIG, 3), max_seq=4).sharded
        cache = part.new_cache()
        with pytest.raises(ValueError, match="KV cache holds 4 positions"):
            part.step(torch.tensor([[1, 2, 3, 4, 5]]), cache)
        return list(part.step(torch.tensor([[1, 2, 3]]), cache).shape)

    assert run_ranks(3, body, timeout=10.0) == [[1, 0], [1, 0], [1, CONFIG.vocab_size]]


def test_other_stages_on_another_rank_are_refused_on_all(run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> str:
        with pytest.raises(ValueError, match="rank 1 has other pipeline stages than rank 0"):
            load_model(BUNDLED, comm, plan=StagePlan((1, 3) if comm.rank else (2, 2), (1, 1)))
        return "refused"

    assert run_ranks(2, body) == ["refused"] * 2


def test_what_one_stage_refuses_all_refuse(run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> str:
        with pytest.raises(ValueError, match="only GGUF files") as caught:
            load_model(BUNDLED, comm, plan=StagePlan((2, 2), (1, 1)), compute="packed" if comm.rank else "auto")
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == f"rank 1: {second}"


@pytest.mark.parametrize(
    ("text", "world_size", "error"),
    [
        ("pp=5", 5, "5 stages of a model with 4 layers: from 1 to 4"),
        ("pp=2,tp=2", 3, "need 4 ranks, and there are 3; possible are pp=1,tp=3, pp=3,tp=1"),
        ("pp=2", 3, "possible are pp=1,tp=3, pp=3,tp=1"),
        ("pp=2,layers=1/2", 2, "1/2 layers don't make up the model's 4"),
        ("pp=2,layers=4/0", 2, "at least one"),
        ("pp=3,layers=2/2", 3, "2 numbers of layers for 3 stages"),
        ("pp=two", 2, "'pp=two'"),
        ("pp=2,pp=2", 2, "each once"),
        ("pp=2,rows=3", 2, "'rows=3'"),
    ],
)
def test_plans_that_cannot_be(text: str, world_size: int, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        stage_plan(text, CONFIG, world_size)


@pytest.mark.parametrize("n_stages", [1, 2, 3, 5, 30])
def test_stages_are_as_even_as_layers_allow(n_stages: int) -> None:
    """No other cut makes the slowest stage faster, where a stage reads its layers and the last one the head too."""
    config = replace(CONFIG, num_hidden_layers=30)
    layer = ShardPlan((5,), (437,), (0,)).n_elements(replace(config, num_hidden_layers=1), 0)
    head = config.vocab_size * config.hidden_size

    def slowest(counts: tuple[int, ...]) -> float:
        return max(n * layer + head * (at == len(counts) - 1) for at, n in enumerate(counts))

    counts = balanced_layers(config, n_stages)
    assert sum(counts) == 30
    assert min(counts) >= 1
    least = (
        min(
            max(-(-(30 - last) // max(1, n_stages - 1)) * layer, last * layer + head)
            for last in range(1, 32 - n_stages)
        )
        if n_stages > 1
        else 30 * layer + head
    )
    assert slowest(counts) == least


def test_layers_keep_their_kinds() -> None:
    config = replace(CONFIG, num_hidden_layers=8, unrotated_layers=(1, 3, 5, 7))
    assert config.of_layers(range(3, 6)).unrotated_layers == (0, 2)
    assert config.of_layers(range(3, 6)).num_hidden_layers == 3
