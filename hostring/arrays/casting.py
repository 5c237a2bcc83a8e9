"""Casting between flat host arrays, rounding to nearest even. numpy does it; `register_cast` replaces a pair."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from hostring.arrays import mxfp4, mxint8
from hostring.arrays.dtypes import FLOAT32, MXFP4, MXINT8, Array, DType

Bind: TypeAlias = Callable[[Array, Array], Callable[[], Any]]

_BINDS: Final[dict[tuple[DType, DType], Bind]] = {
    (MXINT8, FLOAT32): mxint8.bind_widen,
    (MXFP4, FLOAT32): mxfp4.bind_widen,
}


def register_cast(source: DType, target: DType, bind: Bind) -> None:
    """Use `bind(target, source)` for casts of this pair.

    It returns a function that casts once, with the bits of numpy.
    """
    _BINDS[source, target] = bind


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A numpy function without its floating-point warnings and errors. The caller's settings stay as they are.

    The result must not run on two threads at once. It makes no Python call: a small fold takes only a microsecond.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":  # the settings belong to the thread, not to its context
        return np.errstate(all="ignore")(function)
    context = Context()
    context.run(partial(np.seterr, all="ignore"))
    return partial(context.run, function)


def bound_cast(target: Array, source: Array) -> Callable[[], Any]:
    """A function that casts the contents of `source` into `target` each time it is called.

    Both are flat and contiguous.
    """
    bind = _BINDS.get((source.dtype, target.dtype))
    if bind is not None and source.size:
        return bind(target, source)
    return partial(quietly(np.copyto), target, source, casting="unsafe")


@np.errstate(all="ignore")
def copy(target: Array, source: Array) -> None:
    """Cast once, by numpy, arrays of any shape and stride. Numbers that are too large become inf, without a warning."""
    np.copyto(target, source, casting="unsafe")


def fresh(source: Array, dtype: DType, shape: tuple[int, ...]) -> Array:
    """A new array of `dtype` and `shape` with the elements of `source`."""
    target = np.empty(shape, dtype)
    copy(target, source.reshape(shape))
    return target


def cast(target: Array, source: Array) -> None:
    """Cast once. Both are flat and contiguous."""
    bind = _BINDS.get((source.dtype, target.dtype))
    if bind is not None and source.size:
        bind(target, source)()
    else:
        copy(target, source)
