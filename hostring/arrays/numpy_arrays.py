"""numpy arrays and scalars."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hostring.arrays.adapter import Adapter
from hostring.arrays.casting import copy, fresh
from hostring.arrays.dtypes import BY_NAME, CODES, DTYPES, Array, DType, name_of
from hostring.arrays.overlaps import overlap


class NumpyAdapter(Adapter):
    """A subclass of ndarray travels as the plain array beneath it: a matrix, for example, is never flat itself."""

    def view(self, x: Array) -> Array | None:
        if not x.flags.carray or not x.dtype.isnative:
            return None
        if type(x) is not np.ndarray:
            x = x.view(np.ndarray)
        return x if x.ndim == 1 else x.reshape(-1)

    def dtype(self, x: Array) -> DType:
        code = CODES.get(x.dtype)
        return BY_NAME[name_of(x.dtype.newbyteorder("="))] if code is None else DTYPES[code]

    def writable(self, x: Array) -> bool:
        return isinstance(x, np.ndarray) and x.flags.writeable

    def overlap(self, x: Array) -> int:
        if x.flags.c_contiguous or not self.writable(x):
            return 0
        return overlap(x.shape, x.strides, x.itemsize)

    def empty(self, x: Array, shape: tuple[int, ...]) -> Array:
        return np.empty(shape, self.dtype(x))

    def stage(self, x: Array, host: Array) -> None:
        copy(host.reshape(x.shape), np.asarray(x))

    def unstage(self, host: Array, x: Array, shape: tuple[int, ...] | None = None) -> Array:
        if shape is not None:
            return fresh(host, self.dtype(x), shape)
        if self.writable(x):
            copy(np.asarray(x), host.reshape(x.shape))
            return x
        new = fresh(host, x.dtype, x.shape)
        return new if isinstance(x, np.ndarray) else new[()]


def refuse_masked(x: Any) -> None:
    """Raise `TypeError` for a masked array: collectives have no rule for elements that only some ranks have."""
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise TypeError(
            "a numpy masked array can't travel, since a collective would ignore its mask; "
            "pass x.filled(value), or x.data and x.mask"
        )
