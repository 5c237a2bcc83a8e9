"""The collectives of a session that only move data. Whoever calls these holds the session's turn."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, Final

import numpy as np

from hostring.arrays.adapter import Adapter
from hostring.arrays.dtypes import BY_NAME, CARRIERS, Array, carrier
from hostring.arrays.staging import ADAPTERS, adapter_for
from hostring.engine.arguments import check_count, check_out, check_rank, gathered, rows_of, scattered
from hostring.engine.binding import Buffers
from hostring.engine.counters import STAGE
from hostring.engine.memory import NOTHING
from hostring.engine.session import Session
from hostring.errors import CollectiveMismatch, HostringError

DECISION_ROUND: Final = 1 << 20  # the rounds of a decision's second half begin here, apart from those of its first
_BYTE: Final = BY_NAME["uint8"]


class Movements:
    """Data movement of one group. A call like an earlier one goes straight to its program; others are checked first."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._programs = session.planner.programs

    # ------------------------------------------------------------------ from one to all, from all to one

    def broadcast(self, x: Any, root: int, timeout: float | None = None) -> Any:
        """See `Comm.broadcast`."""
        started = perf_counter()
        session = self._session
        adapter = ADAPTERS.get(type(x)) or adapter_for(x)
        view = adapter.view(x)
        if view is not None and type(root) is int:
            program = self._programs.get(("broadcast", view.size, view.dtype, root, None))
            if program is not None:
                session.run(program, Buffers(view.view(CARRIERS[view.dtype]), NOTHING), timeout, started)
                return x
        root = check_rank(root, "root", session.world_size)
        dtype = adapter.dtype(x)
        if session.world_size == 1:
            session.run_alone("broadcast")
            return x
        data = self._lend(adapter, x, view)
        program = session.planner.movement("broadcast", data.size, dtype, root)
        session.run(program, Buffers(data, NOTHING), timeout, started)
        if view is not None or session.rank == root:
            return x
        before = perf_counter()
        result = session.unstage(adapter, data.view(program.dtype), x)
        session.counters.phases[STAGE] += perf_counter() - before
        return result

    def all_gather(
        self, x: Any, counts: Sequence[int] | None = None, out: Any = None, timeout: float | None = None
    ) -> Any:
        """See `Comm.all_gather`."""
        if counts is None and out is None:
            started = perf_counter()
            n = self._session.world_size
            adapter = ADAPTERS.get(type(x)) or adapter_for(x)
            view = adapter.view(x)
            if view is not None:
                program = self._programs.get(("all_gather", view.size, view.dtype, (view.size,) * n, None))
                target = None if program is None else adapter.empty(x, (n, *x.shape))
                flat = None if target is None else adapter.view(target)
                if program is not None and flat is not None:
                    bits = CARRIERS[view.dtype]
                    self._session.run(program, Buffers(view.view(bits), flat.view(bits)), timeout, started)
                    return target
        shape, sizes = gathered(x, counts, self._session.rank, self._session.world_size)
        return self._move("all_gather", x, sizes, shape, out, timeout)

    def gather(self, x: Any, root: int, counts: Sequence[int] | None, out: Any, timeout: float | None) -> Any:
        """See `Comm.gather`."""
        root = check_rank(root, "root", self._session.world_size)
        shape, sizes = gathered(x, counts, self._session.rank, self._session.world_size)
        return self._move("gather", x, (root, sizes), shape if self._session.rank == root else None, out, timeout)

    def scatter(self, x: Any, root: int, counts: Sequence[int] | None, out: Any, timeout: float | None) -> Any:
        """See `Comm.scatter`."""
        root = check_rank(root, "root", self._session.world_size)
        x = x if self._session.rank == root else None
        like, shape, sizes = scattered(x, root, counts, out, self._session.rank, self._session.world_size)
        return self._move("scatter", x, (root, sizes), shape, out, timeout, like)

    def all_to_all(
        self,
        x: Any,
        send_counts: Sequence[int] | None,
        recv_counts: Sequence[int] | None,
        out: Any,
        timeout: float | None,
    ) -> Any:
        """See `Comm.all_to_all`."""
        n, rank = self._session.world_size, self._session.rank
        adapter_for(x).dtype(x)
        mine = np.array(rows_of(x, send_counts, n), np.int64)
        uneven = send_counts is not None or recv_counts is not None
        matrix = self.all_gather(mine, timeout=timeout) if uneven and n > 1 else np.tile(mine, (n, 1))
        received = [int(r) for r in matrix[:, rank]]
        if recv_counts is not None and received != [operator.index(c) for c in recv_counts]:
            what = f"all_to_all: rank {rank} expects {list(recv_counts)} rows, the others send it {received}"
            raise self._session.fail(CollectiveMismatch(what, rank))
        width = math.prod(x.shape[1:])
        counts = tuple(tuple(int(r) * width for r in row) for row in matrix)
        return self._move("all_to_all", x, counts, (sum(received), *x.shape[1:]), out, timeout)

    def barrier(self, timeout: float | None = None) -> None:
        """See `Comm.barrier`."""
        if self._session.world_size == 1:
            self._session.run_alone("barrier")
            return
        program = self._session.planner.movement("barrier", 0, _BYTE, 0)
        self._session.run(program, Buffers(NOTHING, NOTHING), timeout, perf_counter())

    def _move(
        self,
        collective: str,
        x: Any,
        detail: Any,
        shape: tuple[int, ...] | None,
        out: Any,
        timeout: float | None,
        like: Any = None,
    ) -> Any:
        """Move data from `x` into `out`, or a new array of `shape`. `shape` is None where this rank gets no result."""
        started = perf_counter()
        session, like = self._session, x if like is None else like
        adapter = adapter_for(like)
        dtype = adapter.dtype(like)
        if shape is not None:
            check_out(collective, out, math.prod(shape), dtype)
        data = NOTHING if x is None else self._lend(adapter_for(x), x, adapter_for(x).view(x))
        result = np.empty(0, carrier(dtype))
        target, flat = None, None
        if shape is not None:
            target = out if out is not None else adapter.empty(like, shape)
            flat = None if target is None else adapter_for(target).view(target)
            result = (np.empty(math.prod(shape), dtype) if flat is None else flat).view(carrier(dtype))
        if session.world_size == 1:
            result[...] = data
            session.run_alone(collective)
        else:
            program = session.planner.movement(collective, _common_size(collective, data.size, detail), dtype, detail)
            session.run(program, Buffers(data, result), timeout, started)
        if shape is None or flat is not None:
            return target
        if out is None:
            return session.unstage(adapter, result.view(dtype), like, tuple(shape))
        return session.unstage(adapter_for(out), result.view(dtype), out)

    def _lend(self, adapter: Adapter, x: Any, view: Array | None) -> Array:
        """`x` as a flat host array in its own (carrier) dtype: its own memory where it has a view."""
        if view is None:
            view = self._session.memory.staging(math.prod(x.shape), adapter.dtype(x))
            adapter.reuse(x, view)
            self._session.stage(adapter, x, view)
        return view.view(carrier(view.dtype))

    # ------------------------------------------------------------------ bytes and decisions

    def broadcast_bytes(self, data: bytes, root: int, timeout: float | None = None) -> bytes:
        """See `Comm.broadcast_bytes`."""
        root = check_rank(root, "root", self._session.world_size)
        mine = np.frombuffer(data if self._session.rank == root else b"", np.uint8)
        size = self.broadcast(np.array([mine.size], np.int64), root, timeout)
        payload = np.zeros(int(size[0]), np.uint8)
        if self._session.rank == root:
            payload[:] = mine
        self.broadcast(payload, root, timeout)
        return payload.tobytes()

    def gather_bytes(self, data: bytes, timeout: float | None = None) -> list[bytes]:
        """See `Comm.gather_bytes`."""
        sizes = [int(s[0]) for s in self.all_gather(np.array([len(data)], np.int64), timeout=timeout)]
        joined = self.all_gather(np.frombuffer(data, np.uint8), sizes, timeout=timeout).tobytes()
        ends = np.cumsum([0, *sizes])
        return [joined[a:b] for a, b in pairwise(ends)]

    def decide(
        self, x: Array, choose: Callable[[Array], Array], root: int, n: int | None = None, timeout: float | None = None
    ) -> Array:
        """See `Comm.decide`."""
        started = perf_counter()
        session = self._session
        root = check_rank(root, "root", session.world_size)
        x = np.asarray(x, adapter_for(x).dtype(x), order="C")
        decision = np.empty(x.shape if n is None else check_count(n, "n"), x.dtype)
        bits = carrier(x.dtype)
        stacked = np.empty((session.world_size if session.rank == root else 0, *x.shape), x.dtype)
        if session.world_size == 1:
            stacked[0] = x
            session.run_alone("decide")
            return self._chosen(decision, choose, stacked)
        program = session.planner.movement("gather", x.size, x.dtype, (root, (x.size,) * session.world_size), "decide")
        buffers = Buffers(x.reshape(-1).view(bits), stacked.reshape(-1).view(bits))
        session.run(program, buffers, timeout, started, count=False)
        if session.rank == root:
            self._chosen(decision, choose, stacked)
        program = session.planner.movement("broadcast", decision.size, x.dtype, root, "decide", DECISION_ROUND)
        chosen_at = perf_counter()
        left = (session.timeout if timeout is None else timeout) - (chosen_at - started)
        session.run(program, Buffers(decision.reshape(-1).view(bits), NOTHING), left, chosen_at)
        return decision

    def _chosen(self, decision: Array, choose: Callable[[Array], Array], stacked: Array) -> Array:
        """`decision` with what `choose` makes of all contributions. What it raises ends the group."""
        rank = self._session.rank
        try:
            chosen = np.asarray(choose(stacked), decision.dtype)
            if chosen.shape != decision.shape:
                raise ValueError(f"it chose an array of shape {chosen.shape}, it must be {decision.shape}")
            decision[...] = chosen
        except Exception as exc:
            raise self._session.fail(HostringError(f"decide: root {rank} could not choose: {exc!r}", rank)) from exc
        return decision


def _common_size(collective: str, mine: int, detail: Any) -> int:
    """The number of elements that all ranks compare; 0 where they have different numbers and compare a checksum."""
    if collective == "scatter":
        return int(sum(detail[1]))
    if collective == "all_to_all":
        return 0
    shares = detail if collective == "all_gather" else detail[1]
    return mine if len(set(shares)) == 1 else 0
