"""Adds two 16-bit contributions without a float32 buffer. `Planner.sixteen_bit` says when that gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hostring.arrays.casting import bound_cast, cast
from hostring.arrays.dtypes import BFLOAT16, FLOAT32, Array, DType
from hostring.arrays.fold import fold_functions, sixteen_bit_sum
from hostring.engine.receiving import Incoming


class SixteenBitSum:
    """Adds a contribution in place. One that came in another dtype than this rank's is added in float32.

    Args:
        dtype: of this rank's contribution. n_elements: of the whole buffer.
        theirs: the other contribution.
        wide: float32 arrays by size, two of each, which all folds of the program share.
    """

    def __init__(self, dtype: DType, n_elements: int, theirs: Incoming, wide: dict[int, tuple[Array, Array]]) -> None:
        bind = sixteen_bit_sum(dtype, n_elements)
        assert bind is not None
        assert theirs.spot.fixed is not None
        self._add, self._dtype, self._theirs, self._wide = bind(theirs.spot.fixed), dtype, theirs, wide
        self._fold = fold_functions("sum", FLOAT32)[1]
        self._bound: memoryview | None = None  # the payload that `_widen` reads
        self._widen: Callable[[], Any] = lambda: None

    def __call__(self, left: Array, right: Array, out: Array) -> None:
        if self._theirs.side is None:
            self._add(out)
            return
        if out.size not in self._wide:
            self._wide[out.size] = np.empty(out.size, FLOAT32), np.empty(out.size, FLOAT32)
        total, other = self._wide[out.size]
        if self._bound is not self._theirs.side:
            self._bound = self._theirs.side
            self._widen = bound_cast(other, self._theirs.side_array())
        mine = out.view(self._dtype)
        if self._dtype == BFLOAT16:
            np.copyto(total, mine)  # faster than any library's own
        else:
            cast(total, mine)
        self._widen()
        self._fold(total, other, total)
        cast(mine, total)
