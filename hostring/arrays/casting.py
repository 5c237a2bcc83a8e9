"""Casting between flat host arrays, rounding to nearest even. numpy does it; a faster library may take a pair over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from hostring.arrays import mxint8
from hostring.arrays.dtypes import FLOAT32, MXINT8, Array, DType

Bind: TypeAlias = Callable[[Array, Array], Callable[[], Any]]

_BINDS: Final[dict[tuple[DType, DType], Bind]] = {(MXINT8, FLOAT32): mxint8.bind_widen}


def register_cast(source: DType, target: DType, bind: Bind) -> None:
    """Let `bind(target, source)` make the casts of this pair: it returns a function that does one. The bits must be the same."""
    _BINDS[source, target] = bind


def bound_cast(target: Array, source: Array) -> Callable[[], Any]:
    """A function that casts the present contents of `source` into `target`, both flat and contiguous, as often as it is called."""
    bind = _BINDS.get((source.dtype, target.dtype))
    if bind is not None and source.size:
        return bind(target, source)
    if np.can_cast(source.dtype, target.dtype):  # nothing can overflow, so there is nothing to keep quiet
        return partial(np.copyto, target, source)
    return lambda: copy(target, source)


@np.errstate(all="ignore")
def copy(target: Array, source: Array) -> None:
    """Cast once, by numpy, arrays of any shape and stride. What is too large becomes inf, and that is no warning."""
    np.copyto(target, source, casting="unsafe")


def fresh(source: Array, dtype: DType, shape: tuple[int, ...]) -> Array:
    """A new array of `dtype` and `shape` with the elements of `source`."""
    target = np.empty(shape, dtype)
    copy(target, source.reshape(shape))
    return target


def cast(target: Array, source: Array) -> None:
    """Cast once."""
    bound_cast(target, source)()
