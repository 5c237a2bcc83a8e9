"""Folding two contributions into one, and the declared orders in which contributions are folded.

An order is written as a nested pair expression over ranks: ((0, 1), 2) folds x0 with x1, and the result with x2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from hostring.arrays.casting import copy, quietly
from hostring.arrays.dtypes import BFLOAT16, FLOAT16, FLOAT32, Array, DType

T = TypeVar("T")
Fold2: TypeAlias = Callable[[Array, Array, Array], Any]
BindAdd: TypeAlias = Callable[[Array], Callable[[Array], Any]]
Expression: TypeAlias = "Any"  # T, or a pair of expressions over T

ORDERS: Final = ("rank", "ring", "tree")  # the position is the code in frames

_UFUNCS: Final[dict[str, Fold2]] = {
    "sum": np.add,
    "avg": np.add,  # divided once, after the fold
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "min": lambda left, right, out: np.minimum(left, right, out=out),  # numpy deprecates the position for these two
    "max": lambda left, right, out: np.maximum(left, right, out=out),
}
_BOOL_UFUNCS: Final[dict[str, Fold2]] = {
    **{op: _UFUNCS[op] for op in ("band", "bor", "bxor")},
    "sum": np.logical_or,
    "max": np.logical_or,
    "prod": np.logical_and,
    "min": np.logical_and,
}

# Elements up to which numpy widens, adds and rounds in less time than a library adds in 16 bits.
_MAX_NUMPY_ELEMENTS: Final = {FLOAT16: 1 << 8, BFLOAT16: 1 << 11}
_SIXTEEN_BIT_SUMS: Final[dict[DType, BindAdd]] = {}


def register_sixteen_bit_sum(dtype: DType, bind: BindAdd) -> None:
    """Use `bind(other)` to add long arrays of a 16-bit `dtype`.

    It returns a function `add(total)` that adds the contents of `other` to `total`. Arrays come in their carrier dtype.
    The bits must be those of adding in float32, replacing every NaN by the plain one, and rounding to nearest even.
    """
    _SIXTEEN_BIT_SUMS[dtype] = bind


def sixteen_bit_sum(dtype: DType, n_elements: int) -> BindAdd | None:
    """The fastest way to add two contributions of a 16-bit dtype as they are; None where widening them is as fast."""
    few = n_elements <= _MAX_NUMPY_ELEMENTS.get(dtype, -1)
    return partial(_sixteen_bit_sum_of_few, dtype) if few else _SIXTEEN_BIT_SUMS.get(dtype)


def _sixteen_bit_sum_of_few(dtype: DType, other: Array) -> Callable[[Array], Any]:
    fold, theirs = fold_functions("sum", FLOAT32)[1], other.view(dtype)
    left, right = np.empty(other.size, FLOAT32), np.empty(other.size, FLOAT32)
    widen = quietly(np.copyto)

    def add(total: Array) -> None:
        sums = total.view(dtype)
        widen(left, sums)
        widen(right, theirs)
        fold(left, right, left)
        copy(sums, left)

    return add


def fold_functions(op: str, dtype: DType) -> tuple[Fold2, Fold2]:
    """Two functions `f(left, right, out)` for arrays of `dtype`: for inner folds, and for the one that gives a result.

    Integers wrap, bool sums are OR. The bits depend on the operands alone: not on the position in the array, where
    numpy changes from vector to scalar instructions, nor on the machine. See docs/numerical-contract.md. numpy neither
    warns nor raises, whatever the caller's settings. A function may run on one thread at a time.
    """
    if dtype == np.bool_:
        return _BOOL_UFUNCS[op], _BOOL_UFUNCS[op]
    if dtype.kind in "iu":
        return _UFUNCS[op], _UFUNCS[op]
    special: dict[str, Fold2] = {"min": _minimum, "max": _maximum} if dtype.kind == "f" else {"prod": _complex_product}
    fold = special[op] if op in special else quietly(_UFUNCS[op])
    return fold, _with_plain_nans(fold, dtype)


@np.errstate(all="ignore")
def divide(total: Array, world_size: int) -> None:
    """Divide the sum of an "avg" in place.

    Complex numbers are divided as pairs: numpy would use a rounded reciprocal.
    """
    parts = total.view(total.real.dtype) if total.dtype.kind == "c" else total
    np.divide(parts, world_size, out=parts)


def _with_plain_nans(fold: Fold2, dtype: DType) -> Fold2:
    """`fold`, but every NaN of the result is the plain one: which of two NaNs survives depends on the instruction."""
    part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else None

    def plain(left: Array, right: Array, out: Array) -> None:
        fold(left, right, out)
        flat = out if part is None else out.view(part)
        if flat.size:
            largest = flat.item(flat.argmax())  # argmax takes a NaN for the largest; nothing finds one faster
            if largest != largest:
                flat[np.isnan(flat)] = np.nan

    return plain


@np.errstate(all="ignore")
def _minimum(left: Array, right: Array, out: Array) -> None:
    """NaN if either is; -0.0 is below 0.0, which no instruction set agrees on."""
    bits = f"u{out.itemsize}"
    equal, both = left == right, left.view(bits) | right.view(bits)
    np.minimum(left, right, out=out)
    np.copyto(out.view(bits), both, where=equal)  # equal with other bits: the two zeros


@np.errstate(all="ignore")
def _maximum(left: Array, right: Array, out: Array) -> None:
    """NaN if either is; 0.0 is above -0.0."""
    bits = f"u{out.itemsize}"
    equal, both = left == right, left.view(bits) & right.view(bits)
    np.maximum(left, right, out=out)
    np.copyto(out.view(bits), both, where=equal)


@np.errstate(all="ignore")
def _complex_product(left: Array, right: Array, out: Array) -> None:
    """Multiply by real operations, each rounded: numpy's own product fuses some of them on some machines."""
    real = left.real * right.real
    real -= left.imag * right.imag
    imag = left.real * right.imag
    imag += left.imag * right.real
    out.real, out.imag = real, imag


def expression(order: str, terms: Sequence[T], start: int = 0) -> Expression:
    """The nested pairs in which `terms`, given by rank, are folded.

    Args:
        order: "rank" is ((x0 + x1) + x2) + …; "ring" is the same but begins at rank `start`;
            "tree" is the balanced binary tree whose left half is the largest power of two below the count.
        terms: one per rank, or per unit when a rank holds several.
        start: the rank at which "ring" begins for this chunk; the other orders ignore it.
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
