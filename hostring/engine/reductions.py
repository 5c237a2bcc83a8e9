"""The reductions of a session: all_reduce, reduce, reduce_scatter. Whoever calls these holds the session's turn."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final

import numpy as np

from hostring.arrays.adapter import Adapter
from hostring.arrays.casting import cast, copy
from hostring.arrays.dtypes import (
    BFLOAT16,
    BLOCK,
    FLOAT32,
    IN_BLOCKS,
    Array,
    DType,
    carrier,
    check_op,
    nbytes_of,
    wire_dtype,
)
from hostring.arrays.feedback import Feedback
from hostring.arrays.fold import divide
from hostring.arrays.staging import ADAPTERS, adapter_for
from hostring.engine.arguments import check_out, check_rank, check_reduction, rows_of
from hostring.engine.binding import Buffers
from hostring.engine.both_ways import CODECS, BothWays
from hostring.engine.counters import STAGE
from hostring.engine.memory import NOTHING
from hostring.engine.program import Direct, Program
from hostring.engine.session import Session
from hostring.topologies.schedule import offsets

MAX_NUMPY_ROUNDED: Final = 1 << 12  # elements; numpy rounds so many before another library has begun
_BYTE: Final = NOTHING.dtype


class Reductions:
    """Reductions of one group. A call like an earlier one goes straight to its program; others are checked first."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._programs, self._engine, self._control = session.planner.programs, session.engine, session.control
        self._both_ways = BothWays(session) if session.rounds_results else None

    # ------------------------------------------------------------------ all_reduce

    def all_reduce(
        self, x: Any, op: str, timeout: float | None, detail: int | None = None, residual: Array | None = None
    ) -> Any:
        """See `Comm.all_reduce`.

        Args:
            detail: what else all ranks must agree on, see `Call`. residual: where a wire that rounds results puts what
                this rank's chunk has lost.
        """
        started = perf_counter()
        adapter = ADAPTERS.get(type(x)) or adapter_for(x)
        view = adapter.view(x)
        if view is not None and not (self._session.rounds and (view.dtype == FLOAT32 or self._both_ways)):
            program = self._programs.get((view.size, view.dtype, op, detail)) or self._plan(view, op, detail)
            if program is not None:
                data = view if program.carried is None else view.view(program.carried)
                if (direct := program.direct) is not None:
                    self._run_direct(direct, data, None, timeout, started)
                else:
                    self._session.run(program, Buffers(data, NOTHING), timeout, started)
                return x if op != "avg" else self._finish_in_place(view, x, op)
        dtype = check_reduction(x, op)
        if self._session.world_size == 1:
            self._session.run_alone("all_reduce")
            return x
        if self._both_ways is not None and wire_dtype(dtype) == FLOAT32:
            return self._all_reduce_both_ways(adapter, x, view, dtype, op, detail, timeout, started, residual)
        return self._staged_all_reduce(adapter, x, view, dtype, op, detail, timeout, started)

    def compensated(self, x: Any, op: str, timeout: float | None, feedback: Feedback) -> Any:
        """`all_reduce`, after `x` got back what the wire has cut off this rank's contributions before."""
        session, adapter, residual = self._session, adapter_for(x), None
        if op not in ("sum", "avg"):
            raise ValueError(f"all_reduce: feedback={feedback!r} makes up for rounded sums; op={op!r} has none")
        session.check_alive()
        if session.rounds and session.world_size > 1 and adapter.dtype(x) == FLOAT32:
            wanted = np.empty(math.prod(x.shape), FLOAT32)
            residual = feedback.of(wanted.size, session.group.epoch)
            session.stage(adapter, x, wanted)
            wanted += residual
            rounded = wanted.copy()
            self._round(rounded, 0)  # rounding it again changes nothing
            with np.errstate(invalid="ignore"):
                np.subtract(wanted, rounded, out=residual)
            residual[~np.isfinite(residual)] = 0
            x = session.unstage(adapter, rounded, x, agreed=True)
        return self.all_reduce(x, op, timeout, None, residual)

    def _plan(self, view: Array, op: str, detail: int | None) -> Program | None:
        """The program of a first call that works in the caller's memory; None where there is none."""
        check_op(op, view.dtype)
        if self._session.world_size == 1:
            return None
        return self._session.planner.unstaged(view.size, view.dtype, op, detail)

    def _staged_all_reduce(
        self, adapter: Adapter, x: Any, view: Array | None, dtype: DType, op: str, detail: int | None,
        timeout: float | None, started: float,
    ) -> Any:  # fmt: skip
        wire, own = wire_dtype(dtype), self._session.travels_as(dtype)
        if view is None:
            detail = with_overlaps(detail, [adapter.overlap(x)])
        data, raw = self._stage(adapter, x, view, wire, own, in_place=True)
        program = self._session.planner.all_reduce(data.size, wire, op, None if raw is None else own, detail)
        if (direct := program.direct) is not None:
            staged = perf_counter()
            self._session.counters.phases[STAGE] += staged - started
            self._run_direct(direct, data, raw, timeout, staged)
        else:
            self._session.run(program, Buffers(data, NOTHING, raw), timeout, started)
        if data is view:
            return self._finish_in_place(data, x, op)
        return self._unstage(adapter, data, x, op, agreed=True)

    def _all_reduce_both_ways(
        self, adapter: Adapter, x: Any, view: Array | None, dtype: DType, op: str, detail: int | None,
        timeout: float | None, started: float, residual: Array | None,
    ) -> Any:  # fmt: skip
        """An all-reduce whose result is rounded as well."""
        both, own = self._both_ways, self._session.travels_as(dtype)
        assert both is not None
        if view is None:
            detail = with_overlaps(detail, [adapter.overlap(x)])
        data, raw = self._stage(adapter, x, view, FLOAT32, own, in_place=True)
        if both.in_halves(data.size):
            both.reduce(data, raw, own, op, detail, timeout, started, residual)
        else:
            program = self._session.planner.all_reduce(data.size, FLOAT32, op, None if raw is None else own, detail)
            self._session.run(program, Buffers(data, NOTHING, raw), timeout, started)
            both.finish(data, op, residual)
        return x if data is view else self._unstage(adapter, data, x, "sum", agreed=True)

    def _run_direct(
        self, direct: Direct, data: Array, raw: Array | None, timeout: float | None, started: float
    ) -> None:
        """`Session.run` for the short form. It repeats the guard, to save a small all-reduce one Python call."""
        session = self._session
        if session.closed is not None or self._control.cause is not None:
            session.check_alive()
        seq = session.seq
        try:
            self._engine.run_direct(direct, data, raw, seq, session.timeout if timeout is None else timeout, started)
        except BaseException as exc:
            raise session.fail(exc, direct.program, started) from exc
        session.seq = seq + 1
        session.counters.calls["all_reduce"] += 1

    # ------------------------------------------------------------------ the others

    def reduce(self, x: Any, root: int, op: str, timeout: float | None) -> Any:
        """See `Comm.reduce`."""
        started = perf_counter()
        session = self._session
        adapter = ADAPTERS.get(type(x)) or adapter_for(x)
        view = adapter.view(x)
        if view is not None and type(root) is int and not (session.rounds and view.dtype == FLOAT32):
            program = self._programs.get(("reduce", view.size, view.dtype, op, None, root))
            if program is not None:
                session.run(program, Buffers(view, NOTHING), timeout, started)
                return x if session.rank != root else self._finish_in_place(view, x, op)
        root = check_rank(root, "root", session.world_size)
        dtype = check_reduction(x, op)
        if session.world_size == 1:
            session.run_alone("reduce")
            return x
        own = session.travels_as(dtype)
        data, raw = self._stage(adapter, x, view, wire_dtype(dtype), own)
        program = session.planner.reduction("reduce", data.size, data.dtype, op, None if raw is None else own, root)
        session.run(program, Buffers(data, NOTHING, raw), timeout, started)
        if session.rank != root:
            return x
        return self._finish_in_place(data, x, op) if data is view else self._unstage(adapter, data, x, op)

    def reduce_scatter(self, x: Any, op: str, counts: Sequence[int] | None, out: Any, timeout: float | None) -> Any:
        """See `Comm.reduce_scatter`."""
        started = perf_counter()
        session, rank = self._session, self._session.rank
        adapter = adapter_for(x)
        dtype = check_reduction(x, op)
        rows = rows_of(x, counts, session.world_size)
        width = math.prod(x.shape[1:])
        parts = tuple(r * width for r in rows)
        check_out("reduce_scatter", out, parts[rank], dtype)
        wire, own = wire_dtype(dtype), session.travels_as(dtype)
        data, raw = self._stage(adapter, x, adapter.view(x), wire, own if session.world_size > 1 else dtype)
        if splits_blocks(own, parts):
            raw = None
        result = np.empty(parts[rank], wire)
        if session.world_size == 1:
            result[...] = data
            session.run_alone("reduce_scatter")
        else:
            travels = None if raw is None else own
            program = session.planner.reduction("reduce_scatter", data.size, wire, op, travels, parts)
            session.run(program, Buffers(data, result, raw), timeout, started)
        if op == "avg":
            divide(result, session.world_size)
        if out is None:
            return session.unstage(adapter, result, x, (rows[rank], *x.shape[1:]))
        return session.unstage(adapter_for(out), result, out)

    # ------------------------------------------------------------------ to host memory and back

    def _stage(
        self, adapter: Adapter, x: Any, view: Array | None, wire: DType, own: DType, in_place: bool = False
    ) -> tuple[Array, Array | None]:
        """What `x` contributes, as a flat array of the dtype `wire`, and in its own bits when they may travel raw.

        Args:
            own: the dtype that it travels in.
            in_place: `x` will hold the result, and may be rounded where it is.
        """
        if view is not None and own == wire:
            return view, None
        self._session.check_alive()  # a call that can't begin must not round its array
        if view is not None and view.dtype == wire and in_place:
            return view, self._round(view, 0)
        data = self._session.memory.staging(math.prod(x.shape) if view is None else view.size, wire)
        if view is None:
            adapter.reuse(x, data)
        if view is not None and view.dtype == BFLOAT16:
            np.copyto(data, view)  # faster than any library's own
        else:
            self._session.stage(adapter, x, data)
        if own != wire and adapter.dtype(x) == wire:
            return data, self._round(data, data.nbytes)
        return data, view.view(carrier(view.dtype)) if view is not None and view.dtype != wire else None

    def _round(self, data: Array, after: int) -> Array:
        """Round `data` in place to what it travels as. Returns that payload, in staging memory behind `after` bytes."""
        memory = self._session.memory
        own = self._session.travels_as(FLOAT32)
        if own in IN_BLOCKS:
            payload = memory.staging(nbytes_of(data.size, own), _BYTE, after)
            CODECS[own].round_to_blocks(data, payload)
            return payload
        raw = memory.staging(data.size, BFLOAT16, after)
        if data.size <= MAX_NUMPY_ROUNDED:
            copy(raw, data)
        else:
            cast(raw, data)
        np.copyto(data, raw)
        return raw.view(carrier(BFLOAT16))

    def _finish_in_place(self, data: Array, x: Any, op: str) -> Any:
        if op == "avg":
            divide(data, self._session.world_size)
        return x

    def _unstage(self, adapter: Adapter, data: Array, x: Any, op: str, *, agreed: bool = False) -> Any:
        before = perf_counter()
        if op == "avg":
            divide(data, self._session.world_size)
        result = self._session.unstage(adapter, data, x, agreed=agreed)
        self._session.counters.phases[STAGE] += perf_counter() - before
        return result


def splits_blocks(own: DType, counts: Sequence[int]) -> bool:
    """Whether chunks of `counts` elements would cut the blocks that `own` consists of. They then travel as float32."""
    return own in IN_BLOCKS and any(start % BLOCK for start, stop in offsets(counts) if start < stop)


def with_overlaps(detail: int | None, overlaps: Sequence[int]) -> int | None:
    """`detail`, and which elements of this rank's arrays share memory: ranks that differ in that get a mismatch."""
    return zlib.crc32(repr((detail, overlaps)).encode()) or 1 if any(overlaps) else detail
