"""The group of ranks, as users see it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Final

import numpy as np

from . import bootstrap
from .control import Control, again
from .counters import STAGE, Counters
from .dtypes import BY_NAME, Array, DType, carrier, check_op, wire_dtype
from .engine import Engine
from .errors import GroupClosedError, HostringError
from .p2p import Messenger
from .planner import Planner
from .program import Buffers, Direct, Pipe, Program
from .staging import ADAPTERS, Adapter, adapter_for
from .topologies import TOPOLOGIES, check_order
from .tuner import Tuner
from .work import Turns, Work

_NOTHING: Final = np.empty(0, np.uint8)
_SPINS: Final = 2000  # about 2 ms: longer than a layer's lanes differ, shorter than anyone would mind
_DECISION_ROUND: Final = 1 << 20  # the rounds of a decision's second half, apart from those of its first


class Comm:
    """A group of ranks that reduce and exchange arrays, with the same bits on every rank. Made by `hostring.init`.

    Every rank calls the same collectives in the same order. A call on two threads is carried out in a defined order;
    calls with `async_op=True` return a `Work` at once and are carried out first in, first out.

    Attributes:
        rank: this process's index. world_size: how many there are.
        order: the declared fold order; topology: what was asked for; counters: see `Counters`.
    """

    def __init__(self, group: bootstrap.Group, *, topology: str, order: str, timeout: float) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.order, self.topology, self.timeout = order, topology, timeout
        pipes = {peer: Pipe(link) for peer, link in group.data.items()}
        self.counters = Counters(pipes)
        self._group = group
        self._tuner = Tuner(topology, order, group.world_size)
        self._control = Control(group.rank, group.control)
        self._engine = Engine(self._control, self.counters, _spins(group))
        self._planner = Planner(group.rank, group.world_size, self._tuner, order, group.epoch, pipes, self.counters)
        self._programs = self._planner.programs
        self._messenger = Messenger(group.rank, group.p2p, self._control, self.counters, group.epoch)
        self._turns = Turns(f"hostring-{group.name}-{group.rank}")
        self._seq = 0
        self._closed: str | None = None
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ reductions

    def all_reduce(self, x: Any, op: str = "sum", *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Fold `x` of all ranks element by element, in the declared order; all ranks get the same float32 (or own-width) bits.

        Args:
            x: the same number of elements on every rank. Floats of 32 bits or less may differ in dtype between ranks.
                Changed in place, and returned; a new array is returned where `x` is immutable.
            op: sum, avg, min, max, prod, or band, bor, bxor for integers and bool. avg divides after the fold.
            async_op: return a `Work` at once; leave `x` alone until it is done.
            timeout: seconds for the whole operation, instead of the group's.

        Raises:
            TypeError, ValueError: the dtype, the operator or their pair can't be reduced; nothing was sent.
            HostringError: see docs/errors.md. The contents of `x` are unspecified then, and the group is poisoned.

        Cost: (N-1)·S sent per rank for small messages, 2(N-1)/N·S for large ones on a mesh; see docs/topologies.md.
        """
        turns = self._turns
        if async_op:
            self._check(x, op)
            return turns.submit(lambda: self._all_reduce(x, op, timeout), "all_reduce")
        if turns.queued or not turns.turn.acquire(False):
            return turns.run(self._all_reduce, "all_reduce", x, op, timeout)
        try:
            return self._all_reduce(x, op, timeout)
        finally:
            turns.turn.release()

    def _all_reduce(self, x: Any, op: str, timeout: float | None) -> Any:
        started = perf_counter()
        adapter = ADAPTERS.get(type(x)) or adapter_for(x)
        view = adapter.view(x)
        if view is not None:
            program = self._programs.get((view.size, view.dtype, op, None))
            if program is not None and (direct := program.direct) is not None:
                self._run_direct(direct, view, timeout, started)
                if op == "avg":
                    np.divide(view, self.world_size, out=view)
                return x
        dtype = adapter.dtype(x) if view is None else view.dtype
        n_elements = math.prod(x.shape) if view is None else view.size
        check_op(op, dtype)
        wire = wire_dtype(dtype)
        if self.world_size == 1:
            return self._alone("all_reduce", x)
        if wire is dtype and view is not None:
            program = self._planner.all_reduce(n_elements, wire, op, None)
            self._run(program, Buffers(view, _NOTHING), timeout, started)
            if op == "avg":
                np.divide(view, self.world_size, out=view)
            return x
        data, raw = self._stage(adapter, x, view, wire)
        program = self._planner.all_reduce(n_elements, wire, op, None if raw is None else dtype)
        self._run(program, Buffers(data, _NOTHING, raw), timeout, started)
        return self._unstage(adapter, data, x, op)

    def reduce(self, x: Any, root: int = 0, op: str = "sum", *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Like `all_reduce`, but only `root` gets the result; `x` of the others is left as it is and returned."""
        self._check_rank(root, "root")
        self._check(x, op)
        return self._start("reduce", lambda: self._reduce(x, root, op, timeout), async_op)

    def _reduce(self, x: Any, root: int, op: str, timeout: float | None) -> Any:
        started = perf_counter()
        adapter = adapter_for(x)
        if self.world_size == 1:
            return self._alone("reduce", x)
        view = adapter.view(x)
        dtype = adapter.dtype(x)
        wire = wire_dtype(dtype)
        if view is None or wire != dtype:
            data, raw = self._stage(adapter, x, view, wire)
        else:
            data, raw = view, None
        program = self._planner.reduction("reduce", data.size, wire, op, None if raw is None else dtype, root)
        self._run(program, Buffers(data, _NOTHING, raw), timeout, started)
        if self.rank != root:
            return x
        if data is not view:
            return self._unstage(adapter, data, x, op)
        if op == "avg":
            np.divide(data, self.world_size, out=data)
        return x

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, counts: Sequence[int] | None = None, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Fold `x` of all ranks and give rank r part r of the result along the first dimension.

        Args:
            x: shape (rows, …) on every rank. Left as it is.
            counts: rows of each rank's part; without, they must divide evenly.
            out: an array to write into, of shape (rows of this rank, …); without, a new one is made.

        Returns:
            `out`, shape (rows of this rank, …), dtype of `x`.
        """
        self._check(x, op)
        rows = self._rows(x, counts)
        return self._start("reduce_scatter", lambda: self._reduce_scatter(x, op, rows, out, timeout), async_op)

    def _reduce_scatter(self, x: Any, op: str, rows: list[int], out: Any, timeout: float | None) -> Any:
        started = perf_counter()
        adapter = adapter_for(x)
        view, dtype = adapter.view(x), adapter.dtype(x)
        wire = wire_dtype(dtype)
        width = math.prod(x.shape[1:])
        if view is None or wire != dtype:
            data, raw = self._stage(adapter, x, view, wire)
        else:
            data, raw = view, None
        counts = tuple(r * width for r in rows)
        result = np.empty(counts[self.rank], wire)
        if self.world_size == 1:
            result[...] = data
            self._alone("reduce_scatter", x)
        else:
            program = self._planner.reduction("reduce_scatter", data.size, wire, op, None if raw is None else dtype, counts)
            self._run(program, Buffers(data, result, raw), timeout, started)
        if op == "avg":
            np.divide(result, self.world_size, out=result)
        return self._hand_out(adapter, result, x, (rows[self.rank], *x.shape[1:]), out)

    # ------------------------------------------------------------------ data movement

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Give `x` of `root` to all. Floats are rounded to each rank's own dtype; other dtypes must agree. In place."""
        self._check_rank(root, "root")
        adapter_for(x).dtype(x)
        return self._start("broadcast", lambda: self._broadcast(x, root, timeout), async_op)

    def _broadcast(self, x: Any, root: int, timeout: float | None) -> Any:
        started = perf_counter()
        if self.world_size == 1:
            return self._alone("broadcast", x)
        adapter = adapter_for(x)
        data, view = self._lend(adapter, x)
        program = self._planner.movement("broadcast", data.size, adapter.dtype(x), root)
        self._run(program, Buffers(data, _NOTHING), timeout, started)
        return x if view is not None or self.rank == root else self._unstage(adapter, data.view(program.dtype), x, "")

    def all_gather(self, x: Any, *, counts: Sequence[int] | None = None, out: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """Give `x` of every rank to all.

        Args:
            x: the same shape on every rank, or, with `counts`, `counts[r]` rows on rank r and the rest of the shape the same.
            out: an array to write into.

        Returns:
            shape (world_size, *x.shape); with `counts`, the parts one after the other, shape (sum(counts), …).
        """
        shape, sizes = self._gathered(x, counts)
        return self._start("all_gather", lambda: self._move("all_gather", x, sizes, shape, out, timeout), async_op)

    def gather(
        self, x: Any, root: int = 0, *, counts: Sequence[int] | None = None, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Like `all_gather`, but only `root` gets the result; the others get None."""
        self._check_rank(root, "root")
        shape, sizes = self._gathered(x, counts)
        result = shape if self.rank == root else None
        return self._start("gather", lambda: self._move("gather", x, (root, sizes), result, out, timeout), async_op)

    def scatter(
        self, x: Any, root: int = 0, *, counts: Sequence[int] | None = None, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Give part r of `x` of `root` along the first dimension to rank r.

        Args:
            x: on `root`, shape (world_size, …), or (sum(counts), …) with `counts`. Elsewhere ignored; None will do.
            out: where the part goes. Needed on every rank but `root`, which alone knows the shape.
        """
        self._check_rank(root, "root")
        if self.rank != root and out is None:
            raise ValueError(f"scatter: rank {self.rank} is not root and must say by out= where its part goes")
        like = out if out is not None else x
        if self.rank == root:
            width = math.prod(x.shape[1:])
            rows = self._rows(x, counts if counts is not None else [1] * self.world_size)
            sizes = tuple(r * width for r in rows)
            shape = x.shape[1:] if counts is None else (rows[root], *x.shape[1:])
        else:
            width = math.prod(out.shape) if counts is None else math.prod(out.shape[1:])
            sizes = tuple(width * c for c in (counts if counts is not None else [1] * self.world_size))
            shape = tuple(out.shape)
        return self._start("scatter", lambda: self._move("scatter", x if self.rank == root else None, (root, sizes), shape, out, timeout, like), async_op)

    def all_to_all(
        self, x: Any, *, send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None, out: Any = None, async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Give part q of `x` along the first dimension to rank q, and get one part from each, in the order of ranks.

        Args:
            send_counts: rows for each rank; without, they must divide evenly. When given on one rank, give it on all:
                the counts of all ranks are then gathered first, which is one more small collective.
            recv_counts: rows expected from each rank, checked against what the others send.
        """
        adapter_for(x).dtype(x)
        rows = self._rows(x, send_counts)
        uneven = send_counts is not None or recv_counts is not None
        return self._start("all_to_all", lambda: self._all_to_all(x, rows, recv_counts, uneven, out, timeout), async_op)

    def _all_to_all(self, x: Any, rows: list[int], recv_counts: Sequence[int] | None, uneven: bool, out: Any, timeout: float | None) -> Any:
        width = math.prod(x.shape[1:])
        mine = np.array([r * width for r in rows], np.int64)
        n = self.world_size
        matrix = self._move("all_gather", mine, (n,) * n, (n, n), None, timeout) if uneven and n > 1 else np.tile(mine, (n, 1))
        received = matrix[:, self.rank]
        if recv_counts is not None and [int(c) for c in received] != [c * width for c in recv_counts]:
            sent = [int(c) // max(width, 1) for c in received]
            raise self._fail(HostringError(f"all_to_all: rank {self.rank} expects {list(recv_counts)} rows, the others send it {sent}"))
        counts = tuple(tuple(int(c) for c in row) for row in matrix)
        shape = (int(received.sum()) // width if width else sum(rows), *x.shape[1:])
        return self._move("all_to_all", x, counts, shape, out, timeout)

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return when every rank has called it."""
        return self._start("barrier", lambda: self._barrier(timeout), async_op)

    def _barrier(self, timeout: float | None) -> None:
        if self.world_size == 1:
            self._alone("barrier", None)
            return
        program = self._planner.movement("barrier", 0, BY_NAME["uint8"], 0)
        self._run(program, Buffers(_NOTHING, _NOTHING), timeout, perf_counter())

    def decide(self, x: Any, choose: Callable[[Array], Array], root: int = 0, *, timeout: float | None = None) -> Array:
        """One collective in which `root` decides for all: everybody contributes `x`, everybody gets the bytes that `root` chose.

        Args:
            x: a numpy array, the same shape and dtype on every rank.
            choose: called on `root` alone with all contributions, shape (world_size, *x.shape); returns an array of the
                shape and dtype of `x`. What it raises is raised on every rank.

        Returns:
            what `choose` returned, bit for bit the same on every rank.
        """
        self._check_rank(root, "root")
        result: Array = self._turns.run(self._decide, "decide", np.ascontiguousarray(x), choose, root, timeout)
        return result

    def _decide(self, x: Array, choose: Callable[[Array], Array], root: int, timeout: float | None) -> Array:
        started = perf_counter()
        stacked = np.empty((self.world_size if self.rank == root else 0, *x.shape), x.dtype)
        flat = x.reshape(-1)
        if self.world_size > 1:
            sizes = (root, (x.size,) * self.world_size)
            self._run(self._planner.movement("gather", x.size, x.dtype, sizes, "decide"), Buffers(flat, stacked.reshape(-1)), timeout, started, count=False)
        else:
            stacked[0] = x
            self._alone("decide", x)
        decision = np.empty_like(flat)
        if self.rank == root:
            try:
                decision[...] = np.asarray(choose(stacked), x.dtype).reshape(-1)
            except Exception as exc:
                raise self._fail(HostringError(f"decide: root {root} could not choose: {exc!r}", root)) from exc
        if self.world_size > 1:
            program = self._planner.movement("broadcast", x.size, x.dtype, root, "decide", _DECISION_ROUND)
            self._run(program, Buffers(decision, _NOTHING), timeout, started)
        return decision.reshape(x.shape)

    # ------------------------------------------------------------------ point to point

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Send `x` to rank `dst`. Returns when `x` may be changed again; large messages wait for the receiver.

        Two ranks may both send first. Returns None, or a `Work` with `async_op`, which progresses without `wait`.
        """
        self._check_peer(dst, "dst")
        self._alive()
        adapter = adapter_for(x)
        view = adapter.view(x)
        data = np.empty(math.prod(x.shape), adapter.dtype(x)) if view is None else view
        if view is None:
            adapter.to_wire(x, data)
        work = self._messenger.send(data, dst, tag, self.timeout if timeout is None else timeout, async_op)
        return work if async_op else self._finish(work)

    def recv(self, x: Any, src: int | None = None, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Receive into `x` the next message with `tag` from rank `src`, or from any rank when it is None.

        Floats are rounded to the dtype of `x`. Returns `x` (or a new array where `x` is immutable), or a `Work` with
        `async_op`, whose `src` says who sent it.

        Raises:
            CollectiveMismatch: the message has another number of elements, or a dtype that `x` can't take.
        """
        if src is not None:
            self._check_peer(src, "src")
        self._alive()
        adapter = adapter_for(x)
        view = adapter.view(x)
        data = np.empty(math.prod(x.shape), adapter.dtype(x)) if view is None else view
        put_back = None if view is not None else lambda: adapter.from_wire(data, x)
        work = self._messenger.recv(data, src, tag, self.timeout if timeout is None else timeout, x if view is not None else None, put_back, async_op)
        return work if async_op else self._finish(work)

    def _finish(self, work: Any) -> Any:
        try:
            return self._messenger.wait(work)
        except BaseException as exc:
            raise self._fail(exc) from exc

    # ------------------------------------------------------------------ the group itself

    def split(self, color: int | None, key: int | None = None, *, topology: str | None = None, order: str | None = None) -> Comm | None:
        """Make a group of all ranks that name the same `color`, with links of its own, ranked by `key`, then by rank here.

        Every rank of this group must call it. Returns None for a rank whose `color` is None.
        """
        pairs = self.all_gather(np.array([-1 if color is None else color, self.rank if key is None else key], np.int64))
        members = sorted((r for r in range(self.world_size) if pairs[r][0] == color), key=lambda r: (int(pairs[r][1]), r))
        topology, order = topology or self.topology, order or self.order
        name = f"{self._seq}.{color}"
        if color is None:
            self._exchange(b"")
            return None
        group = self._group.subgroup(
            name,
            members.index(self.rank),
            len(members),
            neighbours=neighbours(topology, order),
            contract=contract(topology, order),
            exchange=lambda payload: [all_of_them[r] for all_of_them in [self._exchange(payload)] for r in members],
        )
        return Comm(group, topology=topology, order=order, timeout=self.timeout)

    def _exchange(self, payload: bytes) -> list[bytes]:
        """Give a few bytes to all ranks of this group."""
        sizes = [int(s[0]) for s in self.all_gather(np.array([len(payload)], np.int64))]
        joined = self.all_gather(np.frombuffer(payload, np.uint8), counts=sizes).tobytes()
        ends = np.cumsum([0, *sizes])
        return [joined[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def turn(self, job: Callable[[], Any], *, what: str = "turn", async_op: bool = False) -> Any:
        """Carry out `job`, which calls blocking collectives of this group, as one: no other thread's call comes in between.

        Returns what `job` returns, or a `Work` with `async_op`. Inside, don't wait for this group's asynchronous calls.
        """
        return self._start(what, job, async_op)

    def close(self) -> None:
        """Work off what was accepted, say goodbye, and close all links. Idempotent. Other ranks that still wait for this one fail."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = "closed"
        self._turns.close(self.timeout)
        self._messenger.close()
        self._control.farewell()
        self._group.close()

    def abort(self, reason: str = "aborted by the user") -> None:
        """End the group now, on every rank: calls under way and later ones raise `reason`. May be called from any thread."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = f"aborted: {reason}"
        self._control.flood(HostringError(f"rank {self.rank} aborted the group: {reason}", self.rank))
        for link in self._group.data.values():
            link.abort()
        self._messenger.abort(HostringError(f"rank {self.rank} aborted the group: {reason}", self.rank))
        self._turns.close(1.0)
        self._group.close()

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is None:
            self.close()
        else:
            self.abort(f"{type(exc).__name__}: {exc}")

    def expected_payload(self, collective: str, n_elements: int, dtype: Any = "float32", root: int = 0) -> int:
        """Payload bytes that this rank sends in one call, from the schedule alone.

        Args:
            n_elements: of the buffer of all_reduce, reduce, broadcast; of one rank's share of all_gather, gather, decide.
        """
        if self.world_size == 1:
            return 0
        own = BY_NAME[dtype] if isinstance(dtype, str) else np.dtype(dtype)
        wire, n = wire_dtype(own), self.world_size
        if collective in ("all_reduce", "reduce"):
            schedule = self._planner.all_reduce_schedule(n_elements, wire.itemsize) if collective == "all_reduce" else self._planner.schedule("reduce", n_elements, root, wire.itemsize)
            return schedule.sent_elements(raw=True) * own.itemsize + schedule.sent_elements(raw=False) * wire.itemsize
        even: dict[str, list[tuple[str, Any]]] = {
            "broadcast": [("broadcast", root)],
            "all_gather": [("all_gather", (n_elements,) * n)],
            "gather": [("gather", (root, (n_elements,) * n))],
            "decide": [("gather", (root, (n_elements,) * n)), ("broadcast", root)],
        }
        return own.itemsize * sum(self._planner.schedule(name, n_elements, detail, own.itemsize).sent_elements() for name, detail in even[collective])

    # ------------------------------------------------------------------ shared steps

    def _start(self, what: str, job: Callable[[], Any], async_op: bool) -> Any:
        return self._turns.submit(job, what) if async_op else self._turns.run(job, what)

    def _run(self, program: Program, b: Buffers, timeout: float | None, started: float, count: bool = True) -> None:
        """One program under the next sequence number. A program that is not counted shares its number with the next."""
        if self._closed is not None or self._control.cause is not None:
            self._alive()
        staged = perf_counter()
        try:
            self._engine.run(program, b, self._seq, self.timeout if timeout is None else timeout, staged)
        except BaseException as exc:
            raise self._fail(exc) from exc
        self.counters.phases[STAGE] += staged - started
        if count:
            self._seq += 1
            self.counters.calls[program.call.collective] += 1

    def _run_direct(self, direct: Direct, data: Array, timeout: float | None, started: float) -> None:
        """`_run` for the short form."""
        if self._closed is not None or self._control.cause is not None:
            self._alive()
        seq = self._seq
        try:
            self._engine.run_direct(direct, data, seq, self.timeout if timeout is None else timeout, started)
        except BaseException as exc:
            raise self._fail(exc) from exc
        self._seq = seq + 1
        self.counters.calls["all_reduce"] += 1

    def _alive(self) -> None:
        if self._control.cause is not None:
            raise again(self._control.cause)
        if self._closed is not None:
            raise GroupClosedError(f"rank {self.rank} has {self._closed} this group; make a new one with hostring.init")

    def _alone(self, collective: str, x: Any) -> Any:
        self._alive()
        self.counters.calls[collective] += 1
        return x

    def _fail(self, exc: BaseException) -> BaseException:
        """Poison the group with the first cause, tell everyone, and return what to raise here."""
        if self._closed is not None and self._control.cause is None:
            return GroupClosedError(f"rank {self.rank} has {self._closed} this group while a call was under way")
        if isinstance(exc, HostringError):
            cause = self._control.settle(exc)
        else:
            cause = HostringError(f"rank {self.rank} left a call by {type(exc).__name__}: {exc}", self.rank)
        self._control.flood(cause)
        self._messenger.abort(cause)
        return again(cause) if isinstance(exc, HostringError) else exc

    def _stage(self, adapter: Adapter, x: Any, view: Array | None, wire: DType) -> tuple[Array, Array | None]:
        """`x` as a flat wire array in reused memory, and its own bits when they may travel raw."""
        n_elements = math.prod(x.shape) if view is None else view.size
        data = self._planner.room(n_elements, wire)
        adapter.to_wire(x, data)
        raw = view.view(carrier(view.dtype)) if view is not None and view.dtype != wire else None
        return data, raw

    def _unstage(self, adapter: Adapter, data: Array, x: Any, op: str) -> Any:
        before = perf_counter()
        if op == "avg":
            np.divide(data, self.world_size, out=data)
        result = adapter.from_wire(data, x)
        self.counters.phases[STAGE] += perf_counter() - before
        return result

    def _lend(self, adapter: Adapter, x: Any) -> tuple[Array, Array | None]:
        """`x` as a flat host array in its own (carrier) dtype: its own memory when `view` is not None."""
        view = adapter.view(x)
        if view is None:
            data = self._planner.room(math.prod(x.shape), adapter.dtype(x))
            adapter.to_wire(x, data)
        else:
            data = view
        return data.view(carrier(data.dtype)), view

    def _move(self, collective: str, x: Any, detail: Any, shape: tuple[int, ...] | None, out: Any, timeout: float | None, like: Any = None) -> Any:
        """Data that moves from `x` into a result of `shape` (None: this rank gets no result), into `out` when it is given."""
        started = perf_counter()
        like = x if like is None else like
        adapter = adapter_for(like)
        dtype = adapter.dtype(like)
        data = _NOTHING.view(np.uint8)[:0] if x is None else self._lend(adapter_for(x), x)[0]
        result = np.empty(0, carrier(dtype))
        target, flat = None, None
        if shape is not None:
            target = out if out is not None else adapter.empty(like, shape)
            flat = None if target is None else adapter_for(target).view(target)
            result = (np.empty(math.prod(shape), dtype) if flat is None else flat).view(carrier(dtype))
            if result.size != math.prod(shape):
                raise ValueError(f"{collective}: out has {result.size} elements, the result has {math.prod(shape)}")
        if self.world_size == 1:
            result[...] = data
            self._alone(collective, x)
        else:
            n_elements = data.size if collective in ("all_gather", "gather") else sum(detail[1]) if collective == "scatter" else 0
            uneven = collective in ("all_gather", "gather") and len(set(detail if collective == "all_gather" else detail[1])) > 1
            program = self._planner.movement(collective, 0 if uneven else n_elements, dtype, detail)
            self._run(program, Buffers(data, result), timeout, started)
        if shape is None:
            return None
        if flat is not None:
            return target
        return self._hand_out(adapter, result.view(dtype), like, shape, out)

    def _hand_out(self, adapter: Adapter, result: Array, x: Any, shape: tuple[int, ...], out: Any) -> Any:
        """A host result as an array like `x`, or in `out`."""
        if out is None:
            return adapter.from_wire(result, x, tuple(shape))
        if math.prod(out.shape) != result.size:
            raise ValueError(f"out has {math.prod(out.shape)} elements, the result has {result.size}")
        return adapter_for(out).from_wire(result, out)

    def _gathered(self, x: Any, counts: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        adapter_for(x).dtype(x)
        n_elements = math.prod(x.shape)
        if counts is None:
            return (self.world_size, *x.shape), (n_elements,) * self.world_size
        width = math.prod(x.shape[1:])
        if len(counts) != self.world_size or x.shape[0] != counts[self.rank]:
            raise ValueError(f"counts={list(counts)} must name the rows of each of {self.world_size} ranks; rank {self.rank} brings {x.shape[0]}")
        return (sum(counts), *x.shape[1:]), tuple(c * width for c in counts)

    def _rows(self, x: Any, counts: Sequence[int] | None) -> list[int]:
        total = x.shape[0] if len(x.shape) else 0
        if counts is None:
            if total % self.world_size or not len(x.shape):
                raise ValueError(f"{total} rows don't divide evenly over {self.world_size} ranks; say by counts how many each gets")
            return [total // self.world_size] * self.world_size
        if len(counts) != self.world_size or sum(counts) != total or min(counts) < 0:
            raise ValueError(f"counts={list(counts)} must be {self.world_size} numbers that add up to {total} rows")
        return [int(c) for c in counts]

    def _check(self, x: Any, op: str) -> None:
        check_op(op, adapter_for(x).dtype(x))

    def _check_rank(self, rank: int, name: str) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{name}={rank} is no rank of this group; it has ranks 0 to {self.world_size - 1}")

    def _check_peer(self, rank: int, name: str) -> None:
        self._check_rank(rank, name)
        if rank == self.rank:
            raise ValueError(f"{name}={rank} is this rank itself")


def contract(topology: str, order: str) -> dict[str, Any]:
    """What all ranks must have agreed on before the first byte: checked in the hello."""
    return {"order": order, "topology": topology, "wire": "f32"}


def neighbours(topology: str, order: str) -> Callable[[int, int], set[int]]:
    """Between which ranks the topology needs links."""
    check_order(topology, order)
    return TOPOLOGIES["mesh" if topology == "auto" else topology].neighbours


def _spins(group: bootstrap.Group) -> int:
    """Spinning pays while every rank of this host can have a core of its own, and ruins everything when not."""
    me = group.members[group.rank]
    here = [m for m in group.members if m is not None and me is not None and m.host_id == me.host_id]
    cores = {core for m in here for core in m.cores}
    quota = min((m.cpu_quota for m in here if m.cpu_quota is not None), default=float("inf"))
    threads = len({m.pid for m in here}) < len(here)  # ranks that share one interpreter take turns anyway
    return 0 if threads or len(here) > min(len(cores), quota) else _SPINS
