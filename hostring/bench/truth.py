"""What results must be: the contributions of all ranks and their fold, computed with numpy alone.

The tests have an oracle of their own (tests/oracle.py). The two are written twice on purpose: each checks the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

Array = Any

DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool", "complex64",
    "complex128",
)  # fmt: skip
BLOCK = 32  # elements that share a scale on the wires mxint8 and mxfp4
OPS: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def contribution(rank: int, seed: int, n_elements: int, dtype: np.dtype[Any]) -> Array:
    """What `rank` brings. Values differ by rank, place and seed, and magnitudes so that sums depend on the order."""
    where = np.arange(n_elements, dtype=np.uint64) + np.uint64((seed * 131 + rank * 7 + 1) << 33)
    mixed = _mix(where)
    if dtype.kind == "b":
        return (mixed & np.uint64(1)).astype(bool)
    if dtype.kind in "iu":
        return mixed.astype(f"u{dtype.itemsize}").view(dtype)
    if dtype.kind == "c":
        return (_floats(mixed) + 1j * _floats(_mix(mixed))).astype(dtype)
    return _floats(mixed).astype(dtype)


def _mix(x: Array) -> Array:
    """splitmix64: neighbouring numbers become unrelated ones. Source: Steele, Lea, Flood, OOPSLA 2014."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _floats(mixed: Array) -> Array:
    """float32 of either sign from 1/16 to 16."""
    exponent = (mixed >> np.uint64(40)) % np.uint64(8) + np.uint64(123)
    bits = (mixed & np.uint64(0x807FFFFF)) | (exponent << np.uint64(23))
    return bits.astype(np.uint32).view(np.float32)


def rounded(row: Array, wire: str) -> Array:
    """A contribution as it is folded: float32 is rounded to a narrower wire."""
    wire = wire.removesuffix("-both")
    if row.dtype != np.float32 or wire == "float32":
        return row
    if wire == "mxfp4":
        return _in_fours(row)
    return _in_blocks(row) if wire == "mxint8" else row.astype(dtype_of(wire)).astype(row.dtype)


@np.errstate(all="ignore")
def _in_blocks(row: Array) -> Array:
    """MXINT8, in float64: each block of 32 numbers is rounded to 64ths of the power of two below its largest number."""
    blocks = np.zeros(-(-row.size // BLOCK) * BLOCK)
    blocks[: row.size] = row
    blocks = blocks.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    step = np.ldexp(1.0, np.maximum(np.frexp(largest)[1] - 1, -127) - 6)
    near = np.clip(np.rint(blocks / step), -127, 127) * step + 0.0  # no negative zero
    return np.where(np.isfinite(largest), near, np.nan).reshape(-1)[: row.size].astype(np.float32)


@np.errstate(all="ignore")
def _in_fours(row: Array) -> Array:
    """MXFP4, in float64: each block of 32 is divided by a quarter of the power of two below its largest number."""
    blocks = np.zeros(-(-row.size // BLOCK) * BLOCK)
    blocks[: row.size] = row
    blocks = blocks.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    scale = np.ldexp(1.0, np.maximum(np.frexp(largest)[1] - 1, -125) - 2)
    parts = np.abs(blocks) / scale
    step = np.ldexp(1.0, np.clip(np.frexp(parts)[1] - 1, 0, 2) - 1)  # one bit after the point: 0.5, 1 and 2
    near = np.copysign(np.minimum(np.rint(parts / step) * step, 6.0) * scale, blocks)
    return np.where(np.isfinite(largest), near, np.nan).reshape(-1)[: row.size].astype(np.float32)


def folded(rows: Sequence[Array], op: str, order: str, parts: Sequence[tuple[int, int]] | None = None) -> Array:
    """The fold of one row per rank in the declared order, rounded to the rows' dtype.

    Args:
        parts: of the "ring" order, where part c is folded from rank c + 1 on.
    """
    dtype = rows[0].dtype
    wire = np.dtype(np.float32) if dtype.kind not in "biuc" and dtype.itemsize <= 4 else dtype
    wide = [row.astype(wire) for row in rows]
    ufunc = OPS[op]
    if dtype.kind == "b":
        ufunc = {"sum": np.logical_or, "max": np.logical_or, "prod": np.logical_and, "min": np.logical_and}.get(
            op, ufunc
        )
    with np.errstate(all="ignore"):
        total = _in_order(wide, ufunc, order, parts)
        if op == "avg":
            total = total / total.dtype.type(len(rows))
        return total.astype(dtype)


def _in_order(
    rows: Sequence[Array], ufunc: Callable[..., Array], order: str, parts: Sequence[tuple[int, int]] | None
) -> Array:
    n = len(rows)
    if order == "tree":
        return _tree(rows, ufunc)
    if order == "rank":
        return _line(rows, ufunc)
    result = np.empty_like(rows[0])
    for c, (start, stop) in enumerate(parts or even(rows[0].size, n)):
        first = (c + 1) % n
        result[start:stop] = _line([rows[(first + i) % n][start:stop] for i in range(n)], ufunc)
    return result


def _line(rows: Sequence[Array], ufunc: Callable[..., Array]) -> Array:
    total = rows[0]
    for row in rows[1:]:
        total = ufunc(total, row)
    return total


def _tree(rows: Sequence[Array], ufunc: Callable[..., Array]) -> Array:
    if len(rows) == 1:
        return rows[0]
    half = 1
    while half * 2 < len(rows):
        half *= 2
    return ufunc(_tree(rows[:half], ufunc), _tree(rows[half:], ufunc))


def even(n_elements: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Consecutive parts whose lengths differ by one unit at most, the longer ones first; the last one may end early."""
    ends = np.cumsum([0, *(len(part) for part in np.array_split(np.empty(-(-n_elements // unit), np.bool_), parts))])
    return [(min(int(a) * unit, n_elements), min(int(b) * unit, n_elements)) for a, b in pairwise(ends)]


def count_wrong(got: Array, expected: Array, exact: bool, world_size: int) -> int:
    """How many elements are wrong: other bits, or, without `exact`, a difference larger than rounding in any order."""
    got, expected = np.asarray(got).reshape(-1), expected.reshape(-1)
    if got.size != expected.size:
        return int(max(got.size, expected.size))
    if exact or expected.dtype.kind in "biu":
        width = f"V{expected.dtype.itemsize}"
        return int(
            np.count_nonzero(np.ascontiguousarray(got).view(width) != np.ascontiguousarray(expected).view(width))
        )
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    part = np.empty(0, expected.dtype).real.dtype if expected.dtype.kind == "c" else expected.dtype
    tolerance = 32 * world_size**2 * float(ml_dtypes.finfo(part).eps)  # type: ignore[no-untyped-call]  # contributions reach 16, and a sum may cancel
    return int(np.count_nonzero(~(np.abs(got.astype(wide) - expected.astype(wide)) <= tolerance)))
