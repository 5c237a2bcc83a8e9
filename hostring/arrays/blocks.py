"""What all wires of blocks share: 32 consecutive float32 numbers have one scale."""

from __future__ import annotations

from typing import Final

import numpy as np

from hostring.arrays.dtypes import BLOCK, Array

# Elements up to which numpy's own reduction finds the largest of each block sooner than loops over the array.
_MAX_REDUCE_ELEMENTS: Final = 1 << 12


def largest_of_blocks(magnitudes: Array) -> Array:
    """The largest of each block, a new array of shape (blocks,).

    Args:
        magnitudes: the bits of numbers of no sign, int32, whole blocks.
    """
    n = magnitudes.size
    if n <= _MAX_REDUCE_ELEMENTS:
        found: Array = np.maximum.reduce(magnitudes.reshape(-1, BLOCK), axis=1)
        return found
    # Loops over the whole array, because numpy's short ones cost more than their arithmetic: compare each element with
    # the one half a block on, then a quarter, and so on.
    halves = np.maximum(magnitudes[:-16], magnitudes[16:])
    quarters = np.empty_like(magnitudes)
    np.maximum(halves[:-8], halves[8:], out=quarters[: n - 24])
    fours = quarters.view(np.complex128)  # 8 times 4 lanes a block, of which two are left
    four = np.maximum(fours[::8].copy().view(np.int32), fours[1::8].copy().view(np.int32))
    two = np.maximum(four[:-2], four[2:])
    return np.maximum(two[:-1:4], two[1::4])
