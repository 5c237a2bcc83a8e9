"""Sums of two 16-bit contributions, folded as they are: the bits of folding in float32 and rounding once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from hostring.arrays.fold import sixteen_bit_sum
from hostring.arrays.staging import adapter_for
from hostring.engine.planner import Planner

NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def every_pair_of(dtype: str, n_elements: int, rank: int) -> np.ndarray:
    """Random bits: NaNs, infinities, zeros and subnormal numbers among them."""
    bits = np.random.default_rng((n_elements, rank)).integers(0, 1 << 16, n_elements, np.uint16)
    return bits.view(NUMPY[dtype])


@np.errstate(all="ignore")
def folded(contributions: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """The oracle: float32, then once to nearest even."""
    total = contributions[0].astype(np.float32) + contributions[1].astype(np.float32)
    return total.astype(dtype)


def as_torch(x: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(x.view(np.int16).copy()).view(TORCH[dtype])


def as_numpy(x: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    return (
        x.numpy()
        if x.dtype == torch.float32
        else x.view(torch.int16).numpy().view(NUMPY[str(x.dtype).rpartition(".")[2]])
    )


def check(got: list[np.ndarray], contributions: list[np.ndarray]) -> None:
    for mine in got:
        expected = folded(contributions, mine.dtype)
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(mine), nan)
        bits = f"u{mine.itemsize}"
        np.testing.assert_array_equal(mine.view(bits)[~nan], expected.view(bits)[~nan])


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("n_elements", [0, 1, 15, 256, 257, 1024, 2049, 70_001])
def test_adding_gives_the_bits_of_float32(dtype, n_elements):
    adapter_for(torch.zeros(1))  # brings torch's own
    for shift in range(3):
        left, right = every_pair_of(dtype, n_elements, 0), np.roll(every_pair_of(dtype, n_elements, 1), shift)
        total, other = left.view(np.uint16).copy(), right.view(np.uint16).copy()
        bind = sixteen_bit_sum(NUMPY[dtype], n_elements)
        assert bind is not None
        add = bind(other.view(np.float16) if dtype == "float16" else other)
        add(total.view(np.float16) if dtype == "float16" else total)
        check([total.view(NUMPY[dtype])], [left, right])
        expected = folded([left, right], NUMPY[dtype])
        assert len(set(total[np.isnan(expected)].tolist())) <= 1, "one NaN, whatever went in"


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("n_elements", [0, 1, 300, 5000, 70_001, 600_001])
def test_all_reduce_in_one_piece_and_in_segments(run_ranks, dtype, n_elements, transport):
    contributions = [every_pair_of(dtype, n_elements, rank) for rank in range(2)]

    def calls(comm):
        results = []
        for _ in range(3):
            x = as_torch(contributions[comm.rank], dtype)
            comm.all_reduce(x)
            results.append(as_numpy(x))
        narrow = [p for p in comm.session.planner.programs.values() if p.carried is not None]
        return results, len(narrow), comm.counters.payload_sent

    for results, n_narrow, sent in run_ranks(2, calls, transport=transport):
        assert n_narrow == 1
        assert sent == 3 * 2 * n_elements
        check(results, contributions)


@pytest.mark.parametrize("n_elements", [1, 300, 5000, 600_001])
def test_a_peer_that_brings_another_dtype_is_folded_in_float32(run_ranks, n_elements):
    """Each call may be another pair of dtypes: what was expected from the last one must not show."""
    plans = [
        ("bfloat16", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"),
        ("float16", "float16"), ("float16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float32"),
        ("bfloat16", "bfloat16"),
    ]  # fmt: skip
    values = [every_pair_of("bfloat16", n_elements, rank).astype(np.float32) for rank in range(2)]
    values = [np.where(np.isfinite(v) & (abs(v) < 1e4), v, np.float32(rank + 1.5)) for rank, v in enumerate(values)]

    def brought(plan, rank):
        return torch.from_numpy(values[rank]).to(getattr(torch, plan[rank]))

    def calls(comm):
        return [as_numpy(comm.all_reduce(brought(plan, comm.rank).clone())) for plan in plans]

    by_rank = run_ranks(2, calls)
    for k, plan in enumerate(plans):
        check([by_rank[rank][k] for rank in range(2)], [as_numpy(brought(plan, rank)) for rank in range(2)])


@pytest.mark.parametrize("n_elements", [64, 20_000, 600_001])
def test_two_dtypes_of_16_bits_again_and_again(run_ranks, n_elements):
    """The memory in which they are widened is used again, also by the segments of one call."""
    kinds = ("bfloat16", "float16")
    contributions = [
        [
            np.nan_to_num(every_pair_of("bfloat16", n_elements, 10 * k + rank).astype(np.float32)).clip(-100, 100)
            for rank in range(2)
        ]
        for k in range(4)
    ]
    brought = [[row.astype(NUMPY[kind]) for row, kind in zip(rows, kinds, strict=True)] for rows in contributions]

    def calls(comm):
        return [as_numpy(comm.all_reduce(as_torch(rows[comm.rank], kinds[comm.rank]))) for rows in brought]

    by_rank = run_ranks(2, calls)
    for k, rows in enumerate(brought):
        check([by_rank[rank][k] for rank in range(2)], rows)


def test_a_schedule_that_sends_sums_is_not_looked_at_in_every_call(run_ranks, monkeypatch):
    built = []
    schedule = Planner.all_reduce_schedule
    monkeypatch.setattr(Planner, "all_reduce_schedule", lambda self, *args: built.append(args) or schedule(self, *args))

    def calls(comm):
        for _ in range(20):
            comm.all_reduce(torch.ones(100, dtype=torch.bfloat16))

    run_ranks(2, calls, topology="star")
    assert len(built) <= 4, "once on each rank, and once more when scratch has grown"


def test_only_sums_of_two_are_narrow(run_ranks):
    def calls(comm):
        comm.all_reduce(torch.ones(64, dtype=torch.bfloat16), "max")
        comm.all_reduce(torch.ones(64, dtype=torch.bfloat16), "avg")
        maximum = comm.all_reduce(torch.full((64,), float(comm.rank), dtype=torch.bfloat16), "max")
        total = comm.all_reduce(torch.full((64,), float(comm.rank + 1), dtype=torch.bfloat16))
        return (
            [p.carried is not None for p in comm.session.planner.programs.values()],
            float(maximum[0]),
            float(total[0]),
        )

    for world_size, some in ((2, True), (3, False)):
        for narrow, maximum, total in run_ranks(world_size, calls):
            assert any(narrow) == some
            assert maximum == world_size - 1
            assert total == world_size * (world_size + 1) / 2


def test_numpy_arrays_of_16_bits(run_ranks):
    contributions = [every_pair_of("float16", 200, rank) for rank in range(2)]

    def calls(comm):
        return comm.all_reduce(contributions[comm.rank].copy())

    check(run_ranks(2, calls), contributions)
