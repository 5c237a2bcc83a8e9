"""Arrays whose elements share memory, such as `tensor.expand(...)` and `np.broadcast_to(...)`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostring.arrays.adapter import Adapter
from hostring.arrays.dtypes import Array


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
    """Whether each stride, the smallest first, is longer than the reach of the smaller ones: almost always."""
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


def check_held(adapter: Adapter, host: Array, x: Any) -> None:
    """Raise `ValueError` unless each element of `x`, into which `host` was unstaged, has got its own value."""
    if not adapter.overlap(x):
        return
    dtype = adapter.dtype(x)
    got, wanted = np.empty(host.size, dtype), np.empty(host.size, dtype)
    adapter.stage(x, got)
    adapter.stage(adapter.unstage(host, x, tuple(x.shape)), wanted)
    if got.tobytes() != wanted.tobytes():
        raise ValueError(
            "elements of this array share memory, as in an expanded tensor, and got different values; "
            "pass an array with memory of its own, such as a copy"
        )
