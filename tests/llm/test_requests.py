"""What enters a generation is checked once, on every rank alike; what the vocabulary lacks can't come out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_models import hf_model, save

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.model.sampling import Sampler, local_candidates

Ranks = Callable[..., list[Any]]
V = 101


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(hf_model("qwen3-tied"), tmp_path)


@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (
            [1, 2, V + 5],
            ValueError,
            f"id {V + 5} at position 2 of the prompt is outside the vocabulary; ids are 0 to {V - 1}",
        ),
        ([V], ValueError, f"id {V} at position 0"),
        ([-1], ValueError, "id -1 at position 0"),
        ([3, -200], ValueError, "id -200 at position 1"),
        ([2**70], ValueError, "outside the vocabulary"),
        ([], ValueError, "the prompt is empty"),
        (None, ValueError, "the prompt is empty"),
        ("", ValueError, "the prompt|refused"),
        ("a\ud83d", ValueError, r"U\+D83D at position"),
        ([1.5], TypeError, "no whole number"),
        (["a"], TypeError, "no whole number"),
        (
            np.array([1, 2]),
            TypeError,
            r"the prompt is a ndarray; give text or a list of ids, such as prompt\.tolist\(\)",
        ),
        (np.ones((2, 2)), TypeError, "the prompt is a ndarray"),
        (torch.tensor([1, 2]), TypeError, "the prompt is a Tensor"),
        (b"bytes", TypeError, "the prompt is a bytes"),
        (7, TypeError, "the prompt is a int"),
    ],
)
def test_a_prompt_that_is_none_is_refused_on_every_rank(
    prompt: Any, error: type[Exception], message: str, replicated: bool, path: Path, run_ranks: Ranks
) -> None:
    def run(comm: hostring.Comm) -> str:
        model = load_model(path, comm, replicate_embedding=replicated)
        if isinstance(prompt, str) and not prompt:
            model.tokenizer.templates.sources.clear()
        with pytest.raises(error, match=message) as caught:
            model.generate(prompt if comm.rank == 0 else None)
        assert len(model.generate([1, V - 1], max_tokens=2).tokens) >= 1  # the group lives
        return str(caught.value)

    assert len(set(run_ranks(3, run))) == 1


def test_whole_numbers_of_any_kind_are_ids(path: Path, run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> Any:
        model = load_model(path, comm)
        return [
            model.generate(ids, max_tokens=3).tokens
            for ids in ([4, 5], (4, 5), [np.int32(4), np.int64(5)], range(4, 6))
        ]

    for found in run_ranks(2, run):
        assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize("world_size", [1, 3, 5])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(50.0), Sampling(50.0, top_k=90), Sampling(50.0, top_p=0.99)], ids=str
)
def test_rows_without_a_token_are_never_chosen(
    world_size: int, sampling: Sampling, path: Path, run_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer knows ids 10 to 39 but for 20: the last ranks hold nothing but padding."""
    known = frozenset(range(10, 40)) - {20}
    monkeypatch.setattr(
        "hostring.integrations.llm.checkpoint.chat_tokenizer.ChatTokenizer.known_ids", lambda self: known
    )

    def run(comm: hostring.Comm) -> list[int]:
        model = load_model(path, comm)
        model.tokenizer.eos_ids = frozenset()
        tokens: list[int] = model.generate([11, 12, 13], sampling, max_tokens=60).tokens
        return tokens

    for tokens in run_ranks(world_size, run):
        assert set(tokens) <= known
        assert len(tokens) == 60


def test_a_vocabulary_of_nothing_but_padding_is_no_choice() -> None:
    bits = local_candidates(torch.full((4,), -torch.inf), 4, 0)
    assert Sampler(Sampling()).choose(bits[None]) is None
