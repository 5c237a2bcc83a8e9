"""Rounding to 8-bit blocks: any numbers, special ones, and the largest error."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracle import bits, rank_distinct
from rounded import LENGTHS, rounded, same

from hostring.arrays.dtypes import MXINT8, nbytes_of
from hostring.arrays.mxint8 import bind_widen, round_to_blocks
from hostring.bench import truth


def both_ways(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the rank that brings `x` folds, what the others fold, and what travels. numpy must accept every number."""
    mine, theirs = x.copy(), np.full_like(x, 7.0)
    payload = np.zeros(nbytes_of(x.size, MXINT8), np.uint8)
    with np.errstate(all="raise"):
        round_to_blocks(mine, payload)
        bind_widen(theirs, payload.view(MXINT8))()
    return mine, theirs, payload


FLOATS = st.one_of(
    st.floats(width=32, allow_subnormal=True),
    st.sampled_from(
        [
            -0.0,
            1.0,
            127 / 64,
            127.5 / 64,
            -127.5 / 64,
            1.5 / 64,
            2.5 / 64,
            2.0**-126,
            2.0**-127,
            1.5 * 2**-134,
            2.0**-149,
        ]
    ),
)


@given(arrays(np.float32, st.integers(0, 100), elements=FLOATS))
@settings(max_examples=300)
def test_any_numbers(x):
    mine, theirs, _ = both_ways(x)
    assert same(mine, rounded(x))
    assert same(theirs, rounded(x))


@pytest.mark.parametrize("n_elements", [1, 31, 577, 4096, 4097, 40_000, 70_001])
@pytest.mark.parametrize("low", [0, 0x00800000, 0x3F000000, 0x6F000000, 0x7F000000])
def test_random_bits_from_subnormal_to_infinite(n_elements, low):
    """Of exponents that are near each other, so that blocks don't hold one number and zeros; and signs."""
    rng = np.random.default_rng([n_elements, low])
    x = (
        rng.integers(low, low + 0x04000000, n_elements, np.uint32) | rng.integers(0, 2, n_elements, np.uint32) << 31
    ).view(np.float32)
    if low >= 0x7F000000:  # a NaN here and there: not in every block
        x[rng.random(n_elements) < 0.98] = 1.0
    mine, theirs, _ = both_ways(x)
    assert same(mine, rounded(x))
    assert same(theirs, rounded(x))


def test_what_is_special():
    ties = np.array([64, 0.5, 1.5, 2.5, -0.5, -1.5, 127.4, -127.5], np.float32) / 64
    np.testing.assert_array_equal(both_ways(ties)[0] * 64, [64, 0, 2, 2, 0, -2, 127, -127])
    assert bits(both_ways(np.full(40, -0.0, np.float32))[0]) == bits(np.zeros(40, np.float32)), "of the zeros, +0 alone"
    tiny = np.array([2.0**-126, 2.0**-127, 2.0**-133, 2.0**-134, 3 * 2.0**-134, 2.0**-149], np.float32)
    assert both_ways(tiny[:1])[0] == tiny[:1]
    np.testing.assert_array_equal(both_ways(tiny[1:])[0], np.array([64, 1, 0, 2, 0]) * 2.0**-133)
    largest = np.array([np.finfo(np.float32).max, -3e38, 1e38], np.float32)
    assert np.isfinite(both_ways(largest)[0]).all()
    for bad in (np.inf, -np.inf, np.nan):
        x = np.ones(96, np.float32)
        x[40] = bad
        mine, theirs, payload = both_ways(x)
        for got in (mine, theirs):
            assert np.isnan(got[32:64]).all()
            assert (got[:32] == 1).all()
            assert (got[64:] == 1).all()
        assert payload[96:].tolist() == [127, 255, 127]
        assert not payload[32:64].any(), "what a machine makes of NaN as an integer is its own affair"


def test_the_error_is_at_most_half_a_64th_of_the_largest_powers_of_two():
    x = rank_distinct(1, 5000)[0]
    mine, _, payload = both_ways(x)
    for number, value, near in zip(range(x.size), x, mine, strict=True):
        step = Fraction(2) ** (int(payload[5000 + number // 32]) - 133)
        assert abs(Fraction(float(value)) - Fraction(float(near))) <= (step / 2 if abs(near) < 127 * step else step)


def test_the_truth_of_the_benchmark_is_the_same():
    for n_elements in LENGTHS:
        x = rank_distinct(1, n_elements)[0]
        assert bits(truth.rounded(x, "mxint8")) == bits(rounded(x))
