"""Ranks that hold the same heads share a KV cache by position, and write what one process writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from demo_jobs import job, measured

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.checkpoint.whole_model import ModuleCheckpoint
from hostring.integrations.llm.compute import build_local, stay
from hostring.integrations.llm.context.cache import PositionShard
from hostring.integrations.llm.context.merging import Merging
from hostring.integrations.llm.context.plan import BLOCK_POSITIONS, ContextPlan, context_plan
from hostring.integrations.llm.demo.job import BUNDLED, make_job
from hostring.integrations.llm.model.audit import Clock
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.partial_attention import partial_attention
from hostring.integrations.llm.model.qwen import Decoder

PROMPT, TOKENS = "In the beginning God created the heaven and the earth, and", 24
CONFIG = open_checkpoint(BUNDLED).config
TINY = ModelConfig(61, 24, 40, 2, 6, 3, 8, qkv_bias=True, o_bias=True, tie_word_embeddings=False)
RunRanks = Callable[..., list[Any]]


def generated(plan: ContextPlan, dtypes: tuple[str, ...], comm: hostring.Comm) -> Any:
    dtype = dtypes[comm.rank % len(dtypes)]
    model = load_model(BUNDLED, comm, plan=plan, dtype=dtype, hash_activations=True)
    return model.generate(PROMPT if comm.rank == 0 else None, Sampling(), max_tokens=TOKENS)


@pytest.fixture(scope="module")
def alone() -> list[int]:
    with hostring.init(0, 1) as comm:
        return load_model(BUNDLED, comm).generate(PROMPT, max_tokens=TOKENS).tokens


@pytest.mark.parametrize(("context", "heads"), [(3, 2), (1, 2)])
def test_a_grid_writes_what_one_process_writes(context: int, heads: int, alone: list[int], run_ranks: RunRanks) -> None:
    results = run_ranks(context * heads, partial(generated, ContextPlan(context, heads), ("float32",)))
    layers = CONFIG.num_hidden_layers
    for found in results:
        stats = found.stats
        assert found.tokens == alone
        assert stats.wrong_steps == 0
        assert stats.collectives_per_token == stats.expected_collectives_per_token == 3 * layers + 1
        assert stats.bytes_per_token == stats.expected_bytes_per_token
        assert stats.prefill_bytes == stats.expected_prefill_bytes
    assert len({found.stats.activation_sha256 for found in results}) == 1


def test_ranks_of_unlike_dtypes_write_one_text(run_ranks: RunRanks) -> None:
    mixed = run_ranks(3, partial(generated, ContextPlan(3, 1), ("float32", "bfloat16", "float16")))
    assert len({tuple(found.tokens) for found in mixed}) == 1


def test_steps_of_a_grid_have_the_logits_of_one_process(run_ranks: RunRanks) -> None:
    """A prompt in pieces, several sequences in one step, and a cache that was cut; more ranks than heads in a part."""
    ids = [int(i) for i in np.random.default_rng(3).integers(1, 61, 75)]
    model = Decoder(TINY, 128).initialise(std=0.2)

    def logits(plan: ContextPlan | None, comm: hostring.Comm) -> Any:
        part, _ = build_local(ModuleCheckpoint(model), comm, "exact", torch.device("cpu"), plan=plan, max_seq=128,
                              hash_activations=False, compile=False)  # fmt: skip
        cache, other, found = part.new_cache(), part.new_cache(), []
        for piece in (ids[:50], ids[50:51], ids[51:]):
            found.append(part.step(torch.tensor([piece]), cache).clone())
        cache.truncate(33)
        found.append(part.step(torch.tensor([[7]]), cache).clone())
        found.append(part.step_rows([(cache, [9]), (other, ids[:20])]).clone())
        return np.concatenate([one.numpy() for one in found])

    (want,) = run_ranks(1, partial(logits, None))
    for plan in (ContextPlan(3, 2), ContextPlan(4, 3), ContextPlan(3, 1)):  # of 3 parts each has 2 heads, for 4 ranks
        got = np.concatenate(run_ranks(plan.world_size, partial(logits, plan)), axis=1)
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_shards_of_positions_stay_equal_and_cover_all() -> None:
    for count, block in ((1, 1), (3, 16), (5, 4)):
        shards = [PositionShard(number, count, block) for number in range(count)]
        for length in (0, 1, 15, 16, 17, 47, 48, 49, 200):
            held = [shard.positions(shard.n_held(length)) for shard in shards]
            assert sorted(torch.cat(held).tolist()) == list(range(length))
            assert max(map(len, held)) - min(map(len, held)) <= block
            assert all(bool((positions.diff() > 0).all()) for positions in held)


def merge_bytes(length: int, comm: hostring.Comm) -> tuple[int, Any]:
    """Payload of one decoded row at `length` positions, of which each rank holds a share; and what came of it."""
    rng, dim, heads = np.random.default_rng(length), 8, 6
    q, k, v = (torch.tensor(rng.standard_normal((n, m, dim)), dtype=torch.float32) for n, m in
               ((heads, 1), (2, length), (2, length)))  # fmt: skip
    shard = PositionShard(comm.rank, comm.world_size, BLOCK_POSITIONS)
    positions = shard.positions(shard.n_held(length))
    merging = Merging(comm, tuple(range(n * 2 * dim, (n + 1) * 2 * dim) for n in range(3)), dim, Clock())
    part = partial_attention(q, k[:, positions], v[:, positions], length - 1, positions)
    before = comm.counters.snapshot()["payload_sent"]
    found = merging(part)
    sent = comm.counters.snapshot()["payload_sent"] - before
    group = q.view(2, 3, 1, dim)
    weights = torch.softmax(torch.einsum("kgqd,kpd->kgqp", group.double(), k.double()) / dim**0.5, -1)
    want = torch.einsum("kgqp,kpd->kgqd", weights, v.double()).reshape(-1)[merging.columns[comm.rank].start :]
    return sent, (found.flatten() - want[: found.numel()]).abs().max().item()


def test_what_a_merge_sends_does_not_depend_on_the_length(run_ranks: RunRanks) -> None:
    for results in (run_ranks(3, partial(merge_bytes, 1024)), run_ranks(3, partial(merge_bytes, 65536))):
        assert [sent for sent, _ in results] == [2 * 2 * (8 + 2) * 4] * 3  # to two others, two heads each
        assert max(error for _, error in results) < 1e-5


def test_a_grid_says_which_ranks_it_needs() -> None:
    assert context_plan("context=3,heads=2", 6) == context_plan("heads=2", 6) == ContextPlan(3, 2)
    assert context_plan("context=3") == ContextPlan(3, 1)
    with pytest.raises(ValueError, match=r"needs 6 ranks, and there are 4; possible are context=1,heads=4, .*2,heads"):
        context_plan("context=3,heads=2", 4)
    for text in ("context=0", "context=3,context=2", "context=3,tp=2", "heads=x"):
        with pytest.raises(ValueError, match="expected context=SHARDS and heads=PARTS"):
            context_plan(text, 6)
    with pytest.raises(ValueError, match="can't share 10 query heads"):
        ContextPlan(2, 11).shares(CONFIG)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"compute": "packed"}, "packed compute has no attention over ranks that share a KV cache"),
        ({"same_bits": True}, "same bits can't be promised with context=2,heads=1"),
        ({"compile": True}, "torch can't compile attention that waits for other ranks"),
    ],
)
def test_what_a_grid_has_not_is_refused_by_name(options: dict[str, Any], refusal: str, run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> str:
        with pytest.raises(ValueError, match=refusal) as caught:
            load_model(BUNDLED, comm, plan=ContextPlan(2, 1), **(options if comm.rank else {}))
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == f"rank 1: {second}"
    named = {**options, "compile": "on"} if "compile" in options else options
    with pytest.raises(ValueError, match=refusal):
        make_job(model=None, ranks=2, dtypes="float32", prompts=(), max_tokens=4, temperature=0.0, top_k=0, top_p=1.0,
                 seed=0, controls=False, plan="context=2", **named)  # fmt: skip


def test_ranks_with_other_grids_are_refused_on_all(run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> str:
        with pytest.raises(ValueError, match="rank 1 has another grid of ranks than rank 0"):
            load_model(BUNDLED, comm, plan=ContextPlan(1, 2) if comm.rank else ContextPlan(2, 1))
        return "refused"

    assert run_ranks(2, body) == ["refused"] * 2


def test_a_rank_that_comes_back_joins_the_grid_again(alone: list[int], run_ranks: RunRanks) -> None:
    """Rank 1 loads again in a new group, in which rank 0 keeps its weights."""

    def body(comm: hostring.Comm) -> Any:
        model, again = load_model(BUNDLED, comm, plan=ContextPlan(2, 1)), comm.split(0)
        assert again is not None
        if comm.rank == 0:
            stay(model.sharded, again, same_bits=False)
        else:
            model = load_model(BUNDLED, again, plan=ContextPlan(2, 1))
        return model.generate(PROMPT, max_tokens=6).tokens

    assert run_ranks(2, body) == [alone[:6]] * 2


def test_a_run_shows_its_grid(alone: list[int]) -> None:
    wanted = job(PROMPT, dtypes=("float32",) * 2, plan="context=2,heads=1", grid=(2, 1), max_tokens=12)
    assert type(wanted).from_json(wanted.to_json()) == wanted
    found = measured(wanted)
    assert found["tokens"] == alone[:12]
    assert found["faults"] == []
    assert found["plan"]["grid"] == {"context": 2, "heads": 1, "block_positions": BLOCK_POSITIONS}
    assert len(set(found["activation_sha256"])) == 1
    made = make_job(model=None, ranks=None, dtypes="float32", prompts=(PROMPT,), max_tokens=12, temperature=0.0,
                    top_k=40, top_p=0.95, seed=5, controls=False, plan="context=2,heads=1")  # fmt: skip
    assert replace(made, model=wanted.model) == wanted
