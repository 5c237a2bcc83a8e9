"""Choosing tokens: the same choice however the vocabulary is split, and the right distribution."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostring.integrations.llm.model import sampling as sampling_module
from hostring.integrations.llm.model.sampling import Sampler, Sampling, local_candidates


def choose(logits: np.ndarray, cuts: list[int], sampler: Sampler) -> int | None:
    """What ranks that hold the pieces between `cuts` decide together."""
    bounds = [0, *sorted(cuts), logits.size]
    width = sampler.sampling.candidates(max(b - a for a, b in pairwise(bounds)))
    return sampler.choose(
        np.stack([local_candidates(torch.from_numpy(logits[a:b].copy()), width, a) for a, b in pairwise(bounds)])
    )


def oracle_support(logits: np.ndarray, sampling: Sampling) -> list[int]:
    """The ids that may be chosen, most likely first, ties by id."""
    order = sorted(range(logits.size), key=lambda i: (-logits[i], i))
    if sampling.greedy:
        return order[:1]
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / sampling.temperature)
    kept, mass = [], 0.0
    for i, w in zip(order, weights / weights.sum(), strict=True):
        kept.append(i)
        mass += w
        if mass >= sampling.top_p:
            break
    return kept


# Few distinct values, so that ties are the rule.
LOGITS = st.lists(st.integers(-6, 6), min_size=1, max_size=60).map(lambda v: np.array(v, np.float32) / 2)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.integers(0, 20),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 5),
)


@settings(max_examples=300)
@given(LOGITS, SAMPLINGS, st.data())
def test_the_choice_does_not_depend_on_the_split_and_is_allowed(
    logits: np.ndarray, sampling: Sampling, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, logits.size), max_size=4))
    whole, split = Sampler(sampling), Sampler(sampling)
    support = oracle_support(logits, sampling)
    for _ in range(3):
        got = choose(logits, cuts, split)
        assert got == choose(logits, [], whole)
        assert got in support


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=1),
        Sampling(0.5, top_k=4, seed=2),
        Sampling(2.0, top_p=0.8, seed=3),
        Sampling(1.3, top_k=6, top_p=0.9, seed=4),
    ],
)
def test_frequencies_are_the_probabilities(sampling: Sampling) -> None:
    logits = np.array([0.1, 2.0, -1.0, 1.5, 0.7, 2.1, -3.0, 0.0], np.float32)
    support = oracle_support(logits, sampling)
    weights = np.exp(logits[support].astype(np.float64) / sampling.temperature)
    expected = dict(zip(support, weights / weights.sum(), strict=True))
    sampler, draws = Sampler(sampling), 4000
    counts = np.bincount([choose(logits, [3, 5], sampler) or 0 for _ in range(draws)], minlength=8)
    for i in range(8):
        p = expected.get(i, 0.0)
        assert abs(counts[i] / draws - p) <= 4.5 * np.sqrt(
            p * (1 - p) / draws
        )  # 4.5 sigma; the seed makes it repeatable


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(3.0, top_p=0.9), Sampling(0.7, top_p=0.999)])
def test_a_choice_is_that_of_all_ids_however_few_are_sorted(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1)
    rows = [np.round(random.standard_normal(3000) * spread, 1).astype(np.float32) for spread in (0.2, 2, 8)] * 20
    found = []
    for most in (3000, 1, 4, 300):
        monkeypatch.setattr(sampling_module, "MAX_LIKELY", most)
        sampler = Sampler(sampling)
        found.append([choose(row, [], sampler) for row in rows])
    assert all(one == found[0] for one in found)
    assert len(set(found[0])) > 20


def test_a_seed_repeats_and_another_differs() -> None:
    logits = np.zeros(50, np.float32)
    runs = [[choose(logits, [20], s) for _ in range(20)] for s in (Sampler(Sampling(1.0, seed=k)) for k in (1, 1, 2))]
    assert runs[0] == runs[1] != runs[2]


def test_padding_is_never_chosen() -> None:
    # Three shards of 1, 2 and 0 rows, padded to 2: every real logit is far below anything that padding could hold.
    logits = np.array([-3e38, -3e38, -3e38], np.float32)
    for sampling in (Sampling(), Sampling(1e6, seed=0), Sampling(1.0, top_k=50), Sampling(1.0, top_p=0.999)):
        sampler = Sampler(sampling)
        assert {choose(logits, [1, 3], sampler) for _ in range(30)} <= {0, 1, 2}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=2)])
def test_a_logit_that_is_no_number_is_noticed_wherever_it_is(bad: float, sampling: Sampling) -> None:
    for at in range(6):
        logits = np.arange(6, dtype=np.float32)
        logits[at] = bad
        assert choose(logits, [2, 4], Sampler(sampling)) is None


def test_greedy_and_top_k_bring_few_candidates() -> None:
    assert Sampling().candidates(24576) == 1
    assert Sampling(1.0, top_k=40).candidates(24576) == 40
    assert Sampling(1.0, top_p=0.9).candidates(24576) == 24576


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0 is negative"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, r"top_p 0.0 is not in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p 1.5"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)  # type: ignore[arg-type]
