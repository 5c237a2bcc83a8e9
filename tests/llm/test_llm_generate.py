"""One generation: who decides, when it ends, what is streamed and what is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_models import hf_model, save
from safetensors.torch import load_file, save_file

import hostring
from hostring.integrations.llm.generate import load_model
from hostring.integrations.llm.generation import Generation
from hostring.integrations.llm.model.sampling import Sampling

Ranks = Callable[..., list[Any]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(hf_model("qwen3-tied"), tmp_path)


def test_the_head_rank_alone_decides_prompt_options_and_end(path: Path, run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> Generation:
        model = load_model(path, comm)
        model.tokenizer.eos_ids = frozenset()
        if comm.rank == 0:
            return model.generate([4, 5, 6], Sampling(0.9, top_k=30, seed=3), max_tokens=10)
        return model.generate(None, Sampling(0.1, seed=99), max_tokens=1)

    results = run_ranks(3, run)
    assert len(results[0].tokens) == 10
    assert all(g.tokens == results[0].tokens and g.text == results[0].text for g in results)
    assert results[0].stats.generated_tokens == 10
    assert results[0].stats.prompt_tokens == 3


def test_it_stops_at_a_stop_token_that_only_the_head_knows(path: Path, run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> tuple[Generation, Generation]:
        model = load_model(path, comm)
        model.tokenizer.eos_ids = frozenset()
        free = model.generate([4, 5, 6], max_tokens=12)
        if comm.rank == 0:
            model.tokenizer.eos_ids = frozenset({free.tokens[5]})
        return free, model.generate([4, 5, 6], max_tokens=12)

    for free, stopped in run_ranks(2, run):
        end = free.tokens.index(free.tokens[5]) + 1
        assert stopped.tokens == free.tokens[:end]
        assert stopped.stop_reason == "eos"
        assert free.stop_reason == "length"


def test_text_is_streamed_on_the_head_rank_only(path: Path, run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> tuple[str, Generation]:
        pieces: list[str] = []
        generation = load_model(path, comm).generate(
            [4, 5, 6], Sampling(2.0, seed=1), max_tokens=30, on_text=pieces.append
        )
        return "".join(pieces), generation

    (streamed, whole), (silent, follower) = run_ranks(2, run)
    assert streamed == whole.text == follower.text != ""
    assert silent == ""


def test_a_full_cache_ends_the_generation(path: Path, run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> Generation:
        model = load_model(path, comm, max_seq=10)
        model.tokenizer.eos_ids = frozenset()
        return model.generate([4, 5, 6], max_tokens=50)

    for generation in run_ranks(2, run):
        assert len(generation.tokens) == 8  # seven positions are left, and the last token needs none
        assert generation.stop_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 5, "the prompt is empty"),
        ([1], 0, "max_tokens is 0"),
        (list(range(11)), 5, "11 tokens don't fit the KV cache of 10 positions"),
    ],
)
def test_what_cannot_run_is_refused_on_every_rank_and_the_group_lives(
    prompt: list[int], max_tokens: int, message: str, path: Path, run_ranks: Ranks
) -> None:
    def run(comm: hostring.Comm) -> tuple[str, int]:
        model = load_model(path, comm, max_seq=10)
        with pytest.raises(ValueError, match=message) as caught:
            model.generate(prompt if comm.rank == 0 else None, max_tokens=max_tokens)
        return str(caught.value), len(model.generate([1, 2], max_tokens=2).tokens)

    results = run_ranks(2, run)
    assert results[0] == results[1]


def test_logits_that_are_no_numbers_raise_everywhere(path: Path, run_ranks: Ranks) -> None:
    file = path / "model.safetensors"
    state = load_file(file)
    state["model.norm.weight"] = torch.full_like(state["model.norm.weight"], float("nan"))
    save_file(state, file)

    def run(comm: hostring.Comm) -> None:
        with pytest.raises(ValueError, match="no finite number after 0 tokens"):
            load_model(path, comm).generate([1])
        comm.barrier()  # the first rank to raise must not take the group down under the other

    assert run_ranks(2, run) == [None, None]


def test_a_long_prompt_is_fed_in_chunks(path: Path, run_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [(7 * i) % 101 for i in range(40)]

    def run(comm: hostring.Comm) -> tuple[list[int], int]:
        model = load_model(path, comm)
        model.tokenizer.eos_ids = frozenset()
        before = comm.counters.calls["all_reduce"]
        tokens = model.generate(prompt, max_tokens=6).tokens
        return tokens, comm.counters.calls["all_reduce"] - before

    whole = run_ranks(2, run)
    monkeypatch.setattr("hostring.integrations.llm.generation._PREFILL_CHUNK", 16)
    chunked = run_ranks(2, run)
    assert [r[0] for r in chunked] == [r[0] for r in whole]
    assert whole[0][1] == 6 * 6
    assert chunked[0][1] == (3 + 5) * 6


def test_figures_add_up(path: Path, run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> Any:
        model = load_model(path, comm, hash_activations=True)
        model.tokenizer.eos_ids = frozenset()
        return [model.generate([4, 5, 6], max_tokens=n).stats for n in (20, 20, 1)]

    for first, again, single in run_ranks(2, run):
        assert first.activation_sha256 == again.activation_sha256 != single.activation_sha256
        assert 0 < first.ttft_s < 60
        assert first.wrong_steps == again.wrong_steps == 0
        assert 0 < first.seconds["compute"] < sum(first.seconds.values())
        for stats in (first, single):
            assert stats.prefill_collectives == stats.expected_prefill_collectives == 6 + 1
            assert stats.prefill_bytes == stats.expected_prefill_bytes
        assert first.prefill_tokens_per_s > 0
        assert sum(first.seconds.values()) == pytest.approx(19 / first.decode_tokens_per_s, rel=1e-6)
        assert set(first.seconds) == {"stage", "wait", "transfer", "fold", "compute", "rest"}
        assert single.decode_tokens_per_s is None
        assert single.bytes_per_token is None
        assert single.as_dict()["generated_tokens"] == 1


def test_an_unknown_dtype_is_refused(path: Path) -> None:
    with (
        hostring.init(0, 1) as comm,
        pytest.raises(ValueError, match="'float8' is not one of float32, float16, bfloat16"),
    ):
        load_model(path, comm, dtype="float8")
