"""Attention over parts of the keys, merged, is dense attention: checked against float64 numpy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hostring.integrations.llm.model.attention_kind import FULL, AttentionKind
from hostring.integrations.llm.model.partial_attention import MAX_SCORES, Partial, merged, partial_attention

F64 = npt.NDArray[np.float64]
KINDS = (
    FULL,
    AttentionKind(window=5),
    AttentionKind(window=1),
    AttentionKind(chunk=8),
    AttentionKind(softcap=30.0, scale=0.3),
    AttentionKind(window=7, softcap=50.0),
)


def dense(q: F64, k: F64, v: F64, start: int, kind: AttentionKind, sinks: F64 | None) -> tuple[F64, F64]:
    """By the definition, key for key, in float64. Also the largest score of each query, for the tolerance."""
    heads, queries, dim = q.shape
    out, largest = np.zeros(q.shape), np.zeros((heads, queries))
    for h in range(heads):
        keys, values = k[h * len(k) // heads], v[h * len(v) // heads]
        for i in range(queries):
            at = start + i
            seen = [
                p for p in range(len(keys))
                if p <= at and (not kind.window or at - p < kind.window)
                and (not kind.chunk or p // kind.chunk == at // kind.chunk)
            ]  # fmt: skip
            scores = keys[seen] @ q[h, i] * (kind.scale or dim**-0.5)
            scores = kind.softcap * np.tanh(scores / kind.softcap) if kind.softcap else scores
            base = max([*scores, *([] if sinks is None else [sinks[h]])], default=0.0)
            weights = np.exp(scores - base)
            total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[h] - base))
            largest[h, i] = np.abs(scores).max(initial=0.0)
            out[h, i] = weights @ values[seen] / total if total else 0.0
    return out, largest


def sharded(
    q: F64, k: F64, v: F64, start: int, kind: AttentionKind, sinks: F64 | None, shards: list[list[int]], tile: int
) -> F64:
    """By parts: each shard's keys are those at its positions."""
    query, keys, values = (torch.tensor(x, dtype=torch.float32) for x in (q, k, v))
    parts = []
    for at in shards:
        own = torch.tensor(at, dtype=torch.long)
        found = partial_attention(query, keys[:, own], values[:, own], start, own, kind, tile)
        parts.append(Partial.unpacked(found.packed()))
    stacked = Partial(*(torch.stack(same) for same in zip(*parts, strict=True)))
    return merged(stacked, None if sinks is None else torch.tensor(sinks, dtype=torch.float32)).double().numpy()


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 3]))
    dim = draw(st.sampled_from([2, 8]))
    start, queries = draw(st.integers(0, 40)), draw(st.sampled_from([1, 2, 9]))
    n_shards = draw(st.sampled_from([1, 2, 3, 5]))
    owners = draw(st.lists(st.integers(0, n_shards - 1), min_size=start + queries, max_size=start + queries))
    return {
        "shape": (kv_heads, group, dim), "start": start, "queries": queries, "tile": draw(st.sampled_from([1, 4, 100])),
        "shards": [[p for p, owner in enumerate(owners) if owner == shard] for shard in range(n_shards)],
        "kind": draw(st.sampled_from(KINDS)), "size": draw(st.sampled_from([0.0, 1.0, 1e4])),
        "seed": draw(st.integers(0, 99)), "sinks": draw(st.booleans()),
    }  # fmt: skip


def check(problem: dict[str, Any]) -> None:
    kv_heads, group, dim = problem["shape"]
    start, queries, kind = problem["start"], problem["queries"], problem["kind"]
    rng = np.random.default_rng(problem["seed"])
    q, k, v = (
        rng.standard_normal((heads, n, dim)).astype(np.float32).astype(np.float64)
        for heads, n in ((kv_heads * group, queries), (kv_heads, start + queries), (kv_heads, start + queries))
    )
    q *= problem["size"] / max(1.0, np.abs(q @ np.repeat(k, group, 0).mT).max())
    q = q.astype(np.float32).astype(np.float64)
    sinks = rng.standard_normal(kv_heads * group).astype(np.float32).astype(np.float64) if problem["sinks"] else None
    want, largest = dense(q, k, v, start, kind, sinks)
    got = sharded(q, k, v, start, kind, sinks, problem["shards"], problem["tile"])
    # A score is off by dim roundings of its size, and a weight relatively by as much; sums add one each.
    eps = np.finfo(np.float32).eps
    allowed = (eps * ((dim + 4) * (1 + largest) + start + queries + 8))[..., None] * np.abs(v).max()
    assert np.all(np.abs(got - want) <= 2 * allowed)


@settings(max_examples=150)
@given(problems())
@example({"shape": (2, 3, 8), "start": 0, "queries": 9, "tile": 4, "shards": [[], list(range(9)), []], "kind": FULL,
          "size": 1e4, "seed": 1, "sinks": False})  # fmt: skip
def test_shards_merge_to_dense_attention(problem: dict[str, Any]) -> None:
    check(problem)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_whose_keys_no_query_sees(kind: AttentionKind, with_sinks: bool) -> None:
    """The second shard holds nothing but later positions; with a window the first holds nothing but earlier ones."""
    v, k = (np.random.default_rng(n).standard_normal((1, 60, 4)) for n in (1, 2))
    q = np.random.default_rng(3).standard_normal((2, 3, 4))
    sinks = np.array([0.5, -2.0]) if with_sinks else None
    want, _ = dense(q, k, v, 30, kind, sinks)
    shards = [list(range(10)), list(range(33, 60)), list(range(10, 33))]
    np.testing.assert_allclose(sharded(q, k, v, 30, kind, sinks, shards, 8), want, atol=1e-5)


def test_a_query_that_sees_no_key_gives_zeros() -> None:
    got = sharded(*(np.ones((1, 1, 4)),) * 3, 0, FULL, None, [[], []], 8)
    np.testing.assert_array_equal(got, np.zeros((1, 1, 4)))
    some = torch.ones(1, 1, 4)
    none_seen = partial_attention(some, some, some, 0, torch.tensor([7]))
    assert none_seen.peak.item() == -np.inf
    assert none_seen.total.item() == 0


def test_the_order_of_shards_is_the_order_of_the_fold() -> None:
    """The same parts in the same order give the same bits, however many queries are computed at once."""
    rng = np.random.default_rng(5)
    stacked = torch.tensor(rng.standard_normal((3, 2, 4, 10)), dtype=torch.float32)
    stacked[..., -1] = stacked[..., -1].abs()
    together = merged(Partial.unpacked(stacked))
    for query in range(4):
        one = merged(Partial.unpacked(stacked[:, :, query : query + 1]))
        assert torch.equal(one[:, 0], together[:, query])


@dataclass(frozen=True)
class Noting(AttentionKind):
    """Notes how many scores are held at once."""

    noted: list[int] = field(default_factory=list)

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        self.noted.append(scores.numel())
        return super().capped(scores)


@pytest.mark.parametrize("length", [8192, 65536])
def test_no_more_scores_are_held_than_those_of_a_tile(length: int) -> None:
    rows, heads, kind = 64, 8, Noting()
    q, k = torch.randn(heads, rows, 4), torch.randn(2, length, 4)
    partial_attention(q, k, k, length - rows, torch.arange(length), kind)
    assert sum(kind.noted) == rows * heads * length
    assert max(kind.noted) <= MAX_SCORES < rows * heads * length


MEASURED = """
import resource, sys, torch
from hostring.integrations.llm.model.partial_attention import partial_attention
torch.set_num_threads(1)
length = int(sys.argv[1])
q, k, v = torch.randn(8, 512, 16), torch.randn(2, length, 16), torch.randn(2, length, 16)
partial_attention(q[:, :1], k[:, :9], v[:, :9], 8, torch.arange(9))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
partial_attention(q, k, v, length - 512, torch.arange(length))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_peak_memory_of_a_prompt_is_that_of_a_tile() -> None:
    """Measured in processes of their own: 64 thousand keys take what 8 thousand take, where scores alone are 1 GiB."""
    peaks = []
    for length in (8192, 65536):
        ran = subprocess.run([sys.executable, "-c", MEASURED, str(length)], capture_output=True, text=True, timeout=100,
                             encoding="utf-8", check=True)  # fmt: skip
        peaks.append(int(ran.stdout))
    assert max(peaks) < 64 * 1024, peaks  # KiB
