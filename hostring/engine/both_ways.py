"""All-reduces whose results are rounded to blocks like contributions, so that both travel in few bytes.

The result of an element is rounded once, from the fold of all contributions, in the block in which it lies. So all
ranks hold the same bits, whichever way is taken: each rank folds everything and rounds what it has, or each rank folds
and rounds its own chunk, and sends the blocks to all.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Final

import numpy as np

from hostring.arrays import mxfp4, mxint8
from hostring.arrays.dtypes import BLOCK, FLOAT32, MXFP4, MXINT8, Array, DType, nbytes_of
from hostring.arrays.fold import divide
from hostring.engine.binding import Buffers
from hostring.engine.program import Program
from hostring.engine.session import Session
from hostring.topologies.schedule import offsets, split_evenly

CODECS: Final[dict[DType, Any]] = {MXINT8: mxint8, MXFP4: mxfp4}
_WHOLE: Final = ("one_shot", "relay", "doubling")  # all-reduces in which every rank folds all contributions itself
_SECOND_HALF: Final = 1 << 20  # the first round of the all_gather, beyond those of the reduce_scatter
_BYTE: Final = np.dtype(np.uint8)


class BothWays:
    """All-reduces of one group whose wire rounds results. Whoever calls this holds the session's turn."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._payload = session.travels_as(FLOAT32)

    def in_halves(self, n_elements: int) -> bool:
        """Whether each rank folds its own chunk: the same on all ranks."""
        return in_halves(self._session, n_elements)

    def reduce(
        self, data: Array, raw: Array | None, own: DType, op: str, detail: int | None, timeout: float | None,
        started: float, residual: Array | None,
    ) -> None:  # fmt: skip
        """Fold `data` of all ranks, divide and round it, each rank its own chunk, and share the chunks.

        Args:
            raw: what `data` travels as, of the dtype `own`. detail: see `Call`. residual: see `finish`.
        """
        session, rank = self._session, self._session.rank
        parts = parts_of(session, data.size)
        result = np.empty(parts[rank], FLOAT32)
        program = session.planner.reduction(
            "reduce_scatter", data.size, FLOAT32, op, None if raw is None else own, parts, ("all_reduce", detail or 0)
        )
        session.run(program, Buffers(data, result, raw), timeout, started, count=False)
        start, stop = offsets(parts)[rank]
        mine = self._rounded(result, op, None if residual is None else residual[start:stop])
        halfway = perf_counter()
        left = (session.timeout if timeout is None else timeout) - (halfway - started)
        sizes = tuple(nbytes_of(n, self._payload) for n in parts)
        shared = np.empty(sum(sizes), _BYTE)
        session.run(self._sharing(sizes), Buffers(mine, shared), left, halfway)
        for (a, b), (first, last) in zip(offsets(parts), offsets(sizes), strict=True):
            CODECS[self._payload].bind_widen(data[a:b], shared[first:last])()

    def finish(self, data: Array, op: str, residual: Array | None) -> None:
        """Divide and round a result that every rank has folded itself.

        Args:
            residual: of this rank's feedback, which gets what rounding cuts off the results in this rank's chunk.
        """
        start, stop = offsets(parts_of(self._session, data.size))[self._session.rank]
        if op == "avg":
            divide(data, self._session.world_size)
        before = None if residual is None else data[start:stop].copy()
        self._to_blocks(data)
        if residual is not None and before is not None:
            self._keep(residual[start:stop], before, data[start:stop], op)

    def _rounded(self, chunk: Array, op: str, residual: Array | None) -> Array:
        """Divide and round `chunk` in place. Returns it in blocks."""
        if op == "avg":
            divide(chunk, self._session.world_size)
        before = None if residual is None else chunk.copy()
        payload = self._to_blocks(chunk)
        if residual is not None and before is not None:
            self._keep(residual, before, chunk, op)
        return payload

    def _to_blocks(self, values: Array) -> Array:
        payload = np.empty(nbytes_of(values.size, self._payload), _BYTE)
        CODECS[self._payload].round_to_blocks(values, payload)
        return payload

    def _keep(self, residual: Array, before: Array, after: Array, op: str) -> None:
        """Add what was cut off a result to what this rank contributes next; an average divides it again."""
        times = np.float32(self._session.world_size if op == "avg" else 1)
        with np.errstate(invalid="ignore", over="ignore"):
            residual += times * (before - after)
        residual[~np.isfinite(residual)] = 0

    def _sharing(self, sizes: tuple[int, ...]) -> Program:
        mine = sizes[0] if len(set(sizes)) == 1 else 0
        return self._session.planner.movement("all_gather", mine, _BYTE, sizes, "all_reduce", _SECOND_HALF)


def in_halves(session: Session, n_elements: int) -> bool:
    """See `BothWays.in_halves`."""
    return session.tuner.all_reduce(n_elements, FLOAT32.itemsize).variant not in _WHOLE


def parts_of(session: Session, n_elements: int) -> tuple[int, ...]:
    """Elements of each rank's chunk: whole blocks."""
    pieces = split_evenly(n_elements, session.world_size, BLOCK)
    return tuple(stop - start for start, stop in pieces)
