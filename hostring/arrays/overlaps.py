"""Arrays whose elements share memory, such as `tensor.expand(...)` and `np.broadcast_to(...)`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np


def overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int = 1) -> int:
    """A checksum of which elements share memory; 0 where no two do.

    Ranks whose checksums are equal fold the same elements into the same place, so every place gets one value.

    Args:
        strides: in units of which an element takes `itemsize`.
    """
    dims = sorted((abs(stride), n) for stride, n in zip(strides, shape, strict=True) if n > 1)
    if 0 in shape or _nested(dims, itemsize):
        return 0
    if dims[0][0] and _distinct(dims, itemsize):
        return 0
    pattern = [(n, stride / itemsize) for n, stride in zip(shape, strides, strict=True) if n > 1]
    return zlib.crc32(repr(pattern).encode()) or 1


def _nested(dims: list[tuple[int, int]], itemsize: int) -> bool:
    """Whether each stride, the smallest first, steps over all that the smaller ones reach. Almost every array is like that."""
    reach = itemsize
    for stride, n in dims:
        if stride < reach:
            return False
        reach += stride * (n - 1)
    return True


def _distinct(dims: list[tuple[int, int]], itemsize: int) -> bool:
    """Whether no two elements share memory, by looking at the place of each."""
    places = np.zeros(1, np.int64)
    for stride, n in dims:
        places = (places[:, None] + stride * np.arange(n)).reshape(-1)
    places.sort()
    return bool((np.diff(places) >= itemsize).all())
