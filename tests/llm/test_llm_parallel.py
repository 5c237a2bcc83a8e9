"""The model over several ranks, against the whole model: transformers on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_models import FAMILIES, hf_model, save

import hostring
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.generate import load_model
from hostring.integrations.llm.generation import Generation
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.qwen import Decoder
from hostring.integrations.llm.model.sampling import Sampling
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.model.tensor_parallel import (
    ColumnParallelLinear,
    HiddenReducer,
    ParallelHead,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_logits,
)
from hostring.integrations.llm.sharded import DTYPES, build, parallelize

Ranks = Callable[..., list[Any]]
ROUNDINGS = 40  # see test_llm_model.py


def endless(path: Path, comm: hostring.Comm, **options: Any) -> Any:
    model = load_model(path, comm, **options)
    model.tokenizer.eos_ids = frozenset()
    return model


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_is_whole(family: str, world_size: int, tmp_path: Path, run_ranks: Ranks) -> None:
    oracle = hf_model(family)
    save(oracle, tmp_path)
    prompt = torch.randint(0, 101, (1, 12), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        want = oracle(prompt).logits
        greedy = oracle.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24)

    def run(comm: hostring.Comm) -> tuple[Any, Generation]:
        model = endless(tmp_path, comm, hash_activations=True)
        with torch.inference_mode():
            local = model.sharded.decoder(prompt)
        return gather_logits(comm, local, model.sharded.plan), model.generate(prompt[0].tolist(), max_tokens=24)

    results = run_ranks(world_size, run)
    logits = results[0][0]
    assert np.abs(logits - want.numpy()).max() <= ROUNDINGS * np.finfo(np.float32).eps * want.abs().max().item()
    assert all(r[0] is None for r in results[1:])
    for _, generation in results:
        assert generation.tokens == greedy[0, 12:].tolist()
        assert generation.stats.activation_sha256 == results[0][1].stats.activation_sha256


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_two_reductions_per_layer_and_one_decision_and_the_bytes_of_the_formula(
    world_size: int, tmp_path: Path, run_ranks: Ranks
) -> None:
    save(hf_model("qwen3-tied"), tmp_path)

    def run(comm: hostring.Comm) -> tuple[dict[str, int], Any]:
        model = endless(tmp_path, comm)
        before = dict(comm.counters.calls)
        stats = model.generate([1, 2, 3, 4, 5], max_tokens=9).stats
        return {k: n - before.get(k, 0) for k, n in comm.counters.calls.items() if n > before.get(k, 0)}, stats

    layers, hidden = 3, 60
    for rank, (calls, stats) in enumerate(run_ranks(world_size, run, topology="mesh")):
        # 9 tokens: one prefill step and eight decode steps; the request is shared in two broadcasts.
        assert calls == {"all_reduce": 9 * 2 * layers, "decide": 9, "broadcast": 2}
        assert stats.collectives_per_token == stats.expected_collectives_per_token == 2 * layers + 1
        assert stats.bytes_per_token == stats.expected_bytes_per_token
        # What crosses is hidden states and candidates (a value and an id), whatever the size of attention.
        decision = 8 * (world_size - 1) if rank == 0 else 8
        assert stats.bytes_per_token == 2 * layers * 4 * hidden * (world_size - 1) + decision


@pytest.mark.parametrize(("world_size", "topology"), [(2, "star"), (3, "ring"), (3, "star"), (5, "ring")])
def test_every_topology_gives_the_same_activations(
    world_size: int, topology: str, tmp_path: Path, run_ranks: Ranks
) -> None:
    save(hf_model("qwen2"), tmp_path)

    def run(comm: hostring.Comm) -> Generation:
        return endless(tmp_path, comm, hash_activations=True).generate([9, 8, 7], Sampling(0.8, seed=4), max_tokens=12)

    mesh, other = run_ranks(world_size, run, topology="mesh"), run_ranks(world_size, run, topology=topology)
    assert {g.stats.activation_sha256 for g in mesh} == {g.stats.activation_sha256 for g in other}
    assert len({g.stats.activation_sha256 for g in mesh}) == 1
    assert [g.tokens for g in mesh] == [g.tokens for g in other]
    assert all(g.stats.bytes_per_token == g.stats.expected_bytes_per_token for g in other)


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ("bfloat16", "float32", "float16")])
def test_unlike_dtypes_share_the_bits_of_the_hidden_state(
    dtypes: tuple[str, ...], tmp_path: Path, run_ranks: Ranks
) -> None:
    save(hf_model("qwen3-untied-biased"), tmp_path)

    def run(comm: hostring.Comm) -> Generation:
        return endless(tmp_path, comm, dtype=dtypes[comm.rank], hash_activations=True).generate(
            [5, 6, 7, 8], max_tokens=20
        )

    results = run_ranks(len(dtypes), run, transport="tcp")
    assert len({g.stats.activation_sha256 for g in results}) == 1
    assert len({tuple(g.tokens) for g in results}) == 1


def near_ties(directory: Path) -> Path:
    """A model whose head rows are all but equal: which logit is largest depends on how a rank rounds."""
    oracle = hf_model("qwen3-untied-biased")
    with torch.no_grad():
        noise = torch.randn(101, 60, generator=torch.Generator().manual_seed(7))
        oracle.lm_head.weight.copy_(oracle.lm_head.weight[:1] + 2e-3 * noise)
    return save(oracle, directory)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=5, seed=1), Sampling(1.0, top_p=0.9, seed=2)])
def test_a_near_tie_cannot_part_the_ranks(sampling: Sampling, tmp_path: Path, run_ranks: Ranks) -> None:
    near_ties(tmp_path)
    prompts = [[1, 2, 3], [50, 40], [99]]

    def run(dtypes: tuple[str, ...]) -> list[list[list[int]]]:
        def body(comm: hostring.Comm) -> list[list[int]]:
            model = endless(tmp_path, comm, dtype=dtypes[comm.rank])
            return [model.generate(p, sampling, max_tokens=16).tokens for p in prompts]

        return run_ranks(len(dtypes), body)

    # The tie is real: ranks that decided for themselves would part.
    assert run(("float16",)) != run(("bfloat16",))
    for dtypes in (("float16", "bfloat16"), ("bfloat16", "float16"), ("float16", "bfloat16", "float32")):
        results = run(dtypes)
        assert all(tokens == results[0] for tokens in results)


def test_a_split_embedding_costs_one_reduction_and_changes_nothing(tmp_path: Path, run_ranks: Ranks) -> None:
    save(hf_model("llama"), tmp_path)

    def run(comm: hostring.Comm) -> tuple[list[int], list[int], float | None, int]:
        kept, split = endless(tmp_path, comm), endless(tmp_path, comm, replicate_embedding=False)
        one, other = kept.generate([3, 100, 50, 0], max_tokens=12), split.generate([3, 100, 50, 0], max_tokens=12)
        return one.tokens, other.tokens, other.stats.collectives_per_token, other.stats.expected_collectives_per_token

    for kept, split, counted, expected in run_ranks(3, run):
        assert kept == split
        assert counted == expected == 2 * 3 + 2


def test_uneven_and_unusual_plans_hold(tmp_path: Path, run_ranks: Ranks) -> None:
    save(hf_model("llama-biased-long"), tmp_path)

    def run(plan: ShardPlan) -> Callable[[hostring.Comm], list[int]]:
        def body(comm: hostring.Comm) -> list[int]:
            tokens: list[int] = endless(tmp_path, comm, plan=plan).generate([3, 100, 50, 0], max_tokens=16).tokens
            return tokens

        return body

    want = run_ranks(1, run(ShardPlan((5,), (90,), (101,))))[0]
    for plan in (
        ShardPlan((1, 4), (89, 1), (0, 101)),
        ShardPlan((3, 1, 1), (0, 90, 0), (1, 0, 100)),  # ranks without a column, or without a logit
    ):
        assert run_ranks(plan.world_size, run(plan)) == [want] * plan.world_size


def test_a_plan_for_another_group_is_refused(tmp_path: Path, run_ranks: Ranks) -> None:
    checkpoint = open_checkpoint(save(hf_model("llama"), tmp_path))
    plan = ShardPlan.balanced(checkpoint.config, 3)

    def run(comm: hostring.Comm) -> None:
        with pytest.raises(ValueError, match="the plan is for 3 ranks, the group has 2"):
            build(checkpoint, comm, plan=plan)
        comm.barrier()  # the first rank to raise must not take the group down under the other

    assert run_ranks(2, run) == [None, None]


def test_a_part_of_the_model_stays_where_its_rank_does(tmp_path: Path, run_ranks: Ranks) -> None:
    save(hf_model("llama"), tmp_path)

    def body(comm: hostring.Comm) -> str:
        part = build(open_checkpoint(tmp_path), comm)
        with comm.split(0, key=-comm.rank) as turned:  # rank 1 is the middle one again
            try:
                part.move_to(turned)
            except ValueError as exc:
                return str(exc)
            assert part.comm is turned
        return ""

    left, middle, right = run_ranks(3, body)
    assert "that of rank 0 of 3, the group makes this rank 2 of 3" in left
    assert middle == ""
    assert "that of rank 2 of 3, the group makes this rank 0 of 3" in right


def test_a_decoder_in_memory_is_cut_up_without_touching_it(run_ranks: Ranks) -> None:
    config = ModelConfig(77, 40, 50, 2, 6, 3, 8, max_position_embeddings=32)
    whole = Decoder(config).initialise(seed=4, std=0.2).eval()
    before = {n: t.clone() for n, t in whole.state_dict().items()}
    tokens = torch.tensor([[1, 2, 3, 76]])

    def run(comm: hostring.Comm) -> Any:
        model = parallelize(whole, comm)
        assert sum(p.numel() for p in model.decoder.layers.parameters()) < 0.7 * sum(
            p.numel() for p in whole.layers.parameters()
        )
        with torch.inference_mode():
            return gather_logits(comm, model.decoder(tokens), model.plan)

    got = run_ranks(2, run)[0]
    with torch.inference_mode():
        want = whole(tokens).numpy()
    assert np.abs(got - want).max() <= ROUNDINGS * np.finfo(np.float32).eps * np.abs(want).max()
    assert all(torch.equal(t, before[n]) for n, t in whole.state_dict().items())


def after(calls: list[Callable[[], object]], row: torch.Tensor) -> torch.Tensor:
    """What is in a bound row after these calls."""
    for call in calls:
        call()
    return row.clone()


@pytest.mark.parametrize("threads", ["1", "2"])  # numpy multiplies the row, torch does
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("cuts", [(0, 3, 20), (0, 19, 20), (0, 7, 7, 20)])
def test_the_layers_are_the_whole_matrix(
    cuts: tuple[int, ...], dtype: str, threads: str, run_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
    generator = torch.Generator().manual_seed(11)
    weight, bias, x = (torch.randn(*s, generator=generator) for s in ((20, 20), (20,), (4, 20)))
    kind = DTYPES[dtype]

    def run(comm: hostring.Comm) -> list[torch.Tensor]:
        mine = slice(cuts[comm.rank], cuts[comm.rank + 1])
        reducer = HiddenReducer(comm, 20)
        column = ColumnParallelLinear(weight[mine], bias[mine], kind)
        row = RowParallelLinear(weight[:, mine], bias if comm.rank == 0 else None, kind, reducer)
        embedding = VocabParallelEmbedding(weight[mine], mine.start, reducer)
        head = ParallelHead(weight[mine], mine.start, kind)
        with torch.inference_mode():
            inputs, scratch = x[:1, mine].to(kind).float(), x[:1].to(kind)
            outputs = torch.empty(1, len(weight[mine]), dtype=kind)
            bound = after([*row.bind(inputs, reducer.row), reducer.reduce_row], reducer.row)
            return [
                column(x).float(),
                row(x[:, mine]),
                embedding(torch.tensor([[0, 19, 6, 7]])),
                head(x).float(),
                bound,
                after(column.bind(x[:1], outputs, scratch), outputs).float(),
            ]

    results = run_ranks(len(cuts) - 1, run)
    tolerance = 20 * torch.finfo(kind).eps * 20
    want = x @ weight.t()
    torch.testing.assert_close(torch.cat([r[0] for r in results], -1), want + bias, rtol=0, atol=tolerance)
    torch.testing.assert_close(torch.cat([r[3] for r in results], -1), want, rtol=0, atol=tolerance)
    torch.testing.assert_close(torch.cat([r[5] for r in results], -1), (want + bias)[:1], rtol=0, atol=tolerance)
    for _, row, embedded, _, bound, _ in results:
        torch.testing.assert_close(row, want + bias, rtol=0, atol=tolerance)
        torch.testing.assert_close(bound, (want + bias)[:1], rtol=0, atol=tolerance)
        assert torch.equal(embedded, weight[torch.tensor([[0, 19, 6, 7]])])
        assert torch.equal(row, results[0][1])
