"""Folding: two contributions become one. And the declared orders in which contributions are folded.

An order is written as a nested pair expression over ranks: ((0, 1), 2) folds x0 with x1, and the result with x2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from .dtypes import Array, DType

T = TypeVar("T")
Fold2: TypeAlias = Callable[[Array, Array, Array], Any]
Expression: TypeAlias = "Any"  # T, or a pair of expressions over T

ORDERS: Final = ("rank", "ring", "tree")  # the position is the code on the wire

_UFUNCS: Final[dict[str, np.ufunc]] = {
    "sum": np.add,
    "avg": np.add,  # divided once, after the fold
    "min": np.minimum,  # propagates NaN
    "max": np.maximum,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_BOOL_UFUNCS: Final[dict[str, np.ufunc]] = {"sum": np.logical_or, "max": np.logical_or, "prod": np.logical_and, "min": np.logical_and}


def fold_function(op: str, dtype: DType) -> Fold2:
    """The function `f(left, right, out)` that folds two wire arrays of `dtype`. Integers wrap, bool sums are OR."""
    table = _BOOL_UFUNCS | {k: _UFUNCS[k] for k in ("band", "bor", "bxor")} if dtype == np.bool_ else _UFUNCS
    return table[op]


def expression(order: str, terms: Sequence[T], start: int = 0) -> Expression:
    """The nested pairs in which `terms`, given by rank, are folded.

    Args:
        order: "rank" is ((x0 + x1) + x2) + …; "ring" is the same from rank `start` on, round the ring;
            "tree" is the balanced binary tree whose left half is the largest power of two below the count.
        terms: one per rank, or per unit when a rank holds several.
        start: where the ring begins for this chunk; the other orders ignore it.
    """
    if order == "tree":
        return _balanced(terms)
    first = start % len(terms) if order == "ring" else 0
    rotated = [*terms[first:], *terms[:first]]
    result: Expression = rotated[0]
    for term in rotated[1:]:
        result = (result, term)
    return result


def _balanced(terms: Sequence[T]) -> Expression:
    if len(terms) == 1:
        return terms[0]
    half = 1 << ((len(terms) - 1).bit_length() - 1)
    return (_balanced(terms[:half]), _balanced(terms[half:]))
