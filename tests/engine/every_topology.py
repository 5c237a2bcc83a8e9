"""Where and with how many ranks collectives are tested, and what a reduction must give."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import fold_in_order

from hostring.arrays.dtypes import wire_dtype

TOPOLOGIES = [("mesh", "rank"), ("ring", "rank"), ("star", "rank"), ("tree", "tree"), ("ring", "ring")]


WORLD_SIZES = (1, 2, 3, 5)


everywhere = pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)


sized = pytest.mark.parametrize("world_size", WORLD_SIZES)


UFUNCS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}


LOGICAL = {"sum": np.logical_or, "max": np.logical_or, "prod": np.logical_and, "min": np.logical_and}


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of complex numbers by real operations, each rounded."""
    result = np.empty_like(a)
    result.real, result.imag = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
    return result


def reduced(order: str, rows: list[np.ndarray], op: str) -> np.ndarray:
    """The declared fold of flat arrays, computed in the wire dtype and rounded once."""
    own = rows[0].dtype
    ufunc = {**(LOGICAL if own == np.bool_ else UFUNCS), **BITWISE}[op]
    if own.kind == "c" and op == "prod":
        ufunc = times
    with np.errstate(all="ignore"):
        total = fold_in_order(order, [row.astype(wire_dtype(own)) for row in rows], ufunc)
        if op == "avg":
            parts = total.view(total.real.dtype)
            total = (parts / parts.dtype.type(len(rows))).view(total.dtype)
        return total.astype(own)
