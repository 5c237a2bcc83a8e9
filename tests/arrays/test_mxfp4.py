"""The wire of 4-bit blocks: rounding against the OCP definition and ml_dtypes, and reductions over it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from oracle import bits, fold_in_order, force, rank_distinct
from rounded import fold_in_order as fold_of_blocks

from hostring.arrays.dtypes import MXFP4, nbytes_of
from hostring.arrays.mxfp4 import bind_widen, round_to_blocks
from hostring.bench import truth
from hostring.bench.certify_links import certify_on_links
from hostring.topologies.proof import combinations

LENGTHS = (0, 1, 31, 32, 33, 100, 4097, 70_001)


def by_definition(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers, codes and scales: OCP MX 1.0, section 6.3, with ml_dtypes' float4_e2m1fn and float8_e8m0fnu."""
    numbers, codes, scales = np.empty_like(x), np.zeros(x.size, np.uint8), np.zeros(-(-x.size // 32), np.uint8)
    for k, start in enumerate(range(0, x.size, 32)):
        block = x[start : start + 32]
        if not np.isfinite(block).all():
            numbers[start : start + 32], scales[k] = np.nan, 255
            continue
        largest = np.float64(np.abs(block).max())
        exponent = max(int(np.floor(np.log2(largest))) - 2, -127) if largest else -127
        scale = np.array(2.0**exponent, np.float32).astype(ml_dtypes.float8_e8m0fnu)
        near = np.clip(block / 2.0**exponent, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
        numbers[start : start + 32] = near.astype(np.float64) * 2.0**exponent
        codes[start : start + 32] = near.view(np.uint8)
        scales[k] = 0 if exponent == -127 else scale.view(np.uint8)
    return numbers, codes, scales


def rounded(x: np.ndarray) -> np.ndarray:
    return by_definition(x)[0]


def both_ways(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the rank that brings `x` folds, what the others fold, and what travels."""
    mine, theirs = x.copy(), np.full_like(x, 7.0)
    payload = np.zeros(nbytes_of(x.size, MXFP4), np.uint8)
    with np.errstate(all="raise"):
        round_to_blocks(mine, payload)
        bind_widen(theirs, payload.view(MXFP4))()
    return mine, theirs, payload


@pytest.mark.parametrize("scale", [1.0, 1e-38, 3e-44, 5e37])
@pytest.mark.parametrize("n_elements", LENGTHS)
def test_numbers_codes_and_scales_are_those_of_the_definition(n_elements, scale):
    x = np.clip(rank_distinct(1, n_elements)[0] * np.float64(scale), -3.4e38, 3.4e38).astype(np.float32)
    numbers, codes, scales = by_definition(x)
    mine, theirs, payload = both_ways(x)
    packed = payload[: -(-n_elements // 2)]
    assert bits(mine) == bits(theirs) == bits(numbers)
    np.testing.assert_array_equal(np.stack([packed & 15, packed >> 4], 1).reshape(-1)[:n_elements], codes)
    np.testing.assert_array_equal(payload[packed.size :], scales)
    assert bits(truth.rounded(x, "mxfp4")) == bits(numbers)
    assert bits(both_ways(mine)[0]) == bits(mine), "rounding again changes nothing"


def test_ties_go_to_the_even_neighbour_and_large_numbers_to_six():
    x = np.array([7.9, 7, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 0.26, -5.1, -0.2], np.float32)
    assert both_ways(x)[0].tolist() == [6, 6, 4, 4, 2, 2, 1, 1, 0, 0.5, -6, -0.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_spoils_its_block_and_no_other(bad):
    x = np.ones(96, np.float32)
    x[40] = bad
    for got in both_ways(x)[:2]:
        assert np.isnan(got[32:64]).all()
        assert (np.delete(got, slice(32, 64)) == 1).all()


@pytest.mark.parametrize("combination", list(combinations()), ids="/".join)
def test_every_schedule_gives_the_fold_of_the_rounded(run_ranks, combination):
    topology, variant, order = combination
    rows = {n: rank_distinct(3, n) for n in (1, 33, 100, 1000)}

    def calls(comm):
        force(comm, variant, 100)  # rounded down to whole blocks
        return [comm.all_reduce(row[comm.rank].copy()) for row in rows.values()]

    for results in run_ranks(3, calls, topology=topology, order=order, wire="mxfp4"):
        for row, result in zip(rows.values(), results, strict=True):
            assert bits(result) == bits(fold_of_blocks(order, [rounded(x) for x in row]))
    assert certify_on_links(topology, variant, order, 3, [0, 1, 100], 64, "memory", "mxfp4") == 9


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_parts_bytes_and_other_dtypes(run_ranks, world_size):
    rows = rank_distinct(world_size, 64 * world_size)
    total = fold_in_order("rank", [rounded(row) for row in rows])

    def calls(comm):
        before = comm.counters.payload_sent
        part = comm.reduce_scatter(rows[comm.rank].copy())
        sent = comm.counters.payload_sent - before
        wide = comm.all_reduce(rows[comm.rank].astype(np.float64))
        return part, sent, wide, comm.expected_payload("reduce_scatter", rows[0].size, np.float32)

    for rank, (part, sent, wide, expected) in enumerate(run_ranks(world_size, calls, wire="mxfp4")):
        assert bits(part) == bits(total[64 * rank : 64 * rank + 64])
        assert sent == expected == (world_size - 1) * (32 + 2)  # 0.133 of float32
        assert bits(wide) == bits(fold_in_order("rank", [row.astype(np.float64) for row in rows]))
