"""An all-reduce of many arrays: small ones are joined, so that they take the time of one."""

from __future__ import annotations

import math
import zlib
from time import perf_counter
from typing import Any, Final

import numpy as np

from hostring.arrays.dtypes import FLOAT32, DType, check_op, wire_dtype
from hostring.arrays.staging import adapter_for
from hostring.engine.counters import STAGE
from hostring.engine.reductions import Reductions, with_overlaps
from hostring.engine.session import Session
from hostring.topologies.schedule import batches

MAX_JOINED_ELEMENTS: Final = 1 << 12  # of one array: copying a larger one twice costs more than a call of its own
MAX_BUFFER_ELEMENTS: Final = 1 << 17  # of a joined buffer


def joint_dtype(arrays: list[Any], op: str) -> DType:
    """The dtype in which `arrays` can be joined. Raises `TypeError`, `ValueError`: they can't be folded together."""
    dtypes = {adapter_for(x).dtype(x) for x in arrays}
    for dtype in dtypes:
        check_op(op, dtype)
    if len({wire_dtype(dtype) for dtype in dtypes}) > 1:
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        raise TypeError(f"all_reduce_coalesced: arrays of {names} are not folded in one dtype; make a call for each")
    return dtypes.pop() if len(dtypes) == 1 else FLOAT32


class Coalesced:
    """All-reduces of lists of arrays in one group."""

    def __init__(self, session: Session, reductions: Reductions) -> None:
        self._session, self._reductions = session, reductions

    def all_reduce(self, arrays: list[Any], dtype: DType, op: str, timeout: float | None) -> list[Any]:
        """See `Comm.all_reduce_coalesced`. `dtype` is that of `joint_dtype`."""
        session = self._session
        sizes = tuple(math.prod(x.shape) for x in arrays)
        detail = zlib.crc32(repr(sizes).encode()) or 1 if len(sizes) > 1 else None
        together = session.order != "ring" and not (session.rounds and wire_dtype(dtype) == FLOAT32)
        for batch in batches(sizes, MAX_JOINED_ELEMENTS if together else 0, MAX_BUFFER_ELEMENTS):
            if len(batch) == 1:
                (k,) = batch
                arrays[k] = self._reductions.all_reduce(arrays[k], op, timeout, detail)
            elif session.world_size == 1:
                session.run_alone("all_reduce")
            else:
                results = self._joined([arrays[k] for k in batch], dtype, op, timeout, detail)
                for k, result in zip(batch, results, strict=True):
                    arrays[k] = result
        return arrays

    def _joined(self, arrays: list[Any], dtype: DType, op: str, timeout: float | None, detail: int | None) -> list[Any]:
        """An all-reduce of arrays one after the other in one buffer of `dtype`."""
        started = perf_counter()
        phases = self._session.counters.phases
        buffer, pieces = self._session.memory.joined(tuple(math.prod(x.shape) for x in arrays), dtype)
        adapters = [adapter_for(x) for x in arrays]
        views = [adapter.view(x) for adapter, x in zip(adapters, arrays, strict=True)]
        for adapter, x, view, piece in zip(adapters, arrays, views, pieces, strict=True):
            if view is not None and view.dtype == dtype:
                np.copyto(piece, view)
            else:
                self._session.stage(adapter, x, piece)
        if any(view is None for view in views):
            pairs = zip(adapters, arrays, views, strict=True)
            detail = with_overlaps(
                detail, [0 if view is not None else adapter.overlap(x) for adapter, x, view in pairs]
            )
        phases[STAGE] += perf_counter() - started
        self._reductions.all_reduce(buffer, op, timeout, detail)
        started = perf_counter()
        for k, (adapter, x, view, piece) in enumerate(zip(adapters, arrays, views, pieces, strict=True)):
            if view is not None and view.dtype == dtype:
                np.copyto(view, piece)
            else:
                arrays[k] = self._session.unstage(adapter, piece, x, agreed=True)
        phases[STAGE] += perf_counter() - started
        return arrays
