"""Casts and 16-bit sums of host arrays that torch does faster than numpy, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hostring.arrays.casting import register_cast
from hostring.arrays.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array
from hostring.arrays.fold import register_sixteen_bit_sum


def register(torch: Any) -> None:
    """Let `torch` take over what it does faster."""
    for source, target in ((FLOAT16, FLOAT32), (FLOAT32, FLOAT16), (FLOAT32, BFLOAT16)):
        register_cast(source, target, partial(_bind_cast, torch))  # numpy itself widens bfloat16 faster
    for dtype, kind in ((FLOAT16, torch.float16), (BFLOAT16, torch.bfloat16)):
        if _adds_as_float32(torch, kind):
            nan = int(np.array(np.nan, dtype).view(np.int16))
            register_sixteen_bit_sum(dtype, partial(_bind_add, torch, kind, nan))


def tensor_over(torch: Any, host: Array) -> Any:
    """A tensor over the memory of the flat array `host`."""
    if torch.is_inference_mode_enabled():  # tensors made in this mode can't be written outside it, and this one is kept
        with torch.inference_mode(False):
            return tensor_over(torch, host)
    if host.dtype.isbuiltin == 1:
        return torch.from_numpy(host)
    return torch.from_numpy(host.view(f"i{host.itemsize}")).view(getattr(torch, host.dtype.name))


def _bind_cast(torch: Any, target: Array, source: Array) -> Callable[[], Any]:
    return partial(tensor_over(torch, target).copy_, tensor_over(torch, source))


def _bind_add(torch: Any, dtype: Any, nan: int, other: Array) -> Callable[[Array], None]:
    """A 16-bit sum in torch's `dtype`, whose plain NaN has the bits `nan`: see `register_sixteen_bit_sum`."""
    frombuffer, int16 = torch.frombuffer, torch.int16
    theirs = frombuffer(other, dtype=dtype) if other.size else None

    def add(total: Array) -> None:
        if theirs is None:
            return
        sums = frombuffer(total, dtype=dtype)
        largest = sums.add_(theirs).max().item()
        if largest != largest:  # a NaN counts as the largest
            sums.view(int16)[sums.isnan()] = nan

    return add


def _adds_as_float32(torch: Any, dtype: Any) -> bool:
    """Whether torch's sums are those of float32, rounded. 16-bit instructions may flush subnormal numbers to zero."""
    small = np.arange(1 << 9, dtype=np.int16)
    every = np.arange(-1 << 15, 1 << 15, 1 << 6, dtype=np.int16)
    left = torch.from_numpy(np.concatenate((every, small, small))).view(dtype)
    right = torch.from_numpy(np.concatenate((every[::-1], small[::-1], small[::-1] | np.int16(-1 << 15)))).view(dtype)
    wide = (left.float() + right.float()).to(dtype)
    return bool(torch.equal((left + right).nan_to_num(0).view(torch.int16), wide.nan_to_num(0).view(torch.int16)))
