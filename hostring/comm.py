"""The group of ranks, as users see it."""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from time import perf_counter
from types import TracebackType
from typing import Any, Final

import numpy as np

from hostring.arrays.dtypes import (
    BFLOAT16,
    BLOCK,
    BY_NAME,
    FLOAT16,
    FLOAT32,
    MXINT8,
    Array,
    DType,
    carrier,
    check_op,
    nbytes_of,
    wire_dtype,
)
from hostring.arrays.fold import divide
from hostring.arrays.staging import ADAPTERS, adapter_for
from hostring.engine.counters import STAGE
from hostring.engine.sending import Buffers
from hostring.engine.session import NOTHING, Caller, check_out, check_tag
from hostring.errors import CollectiveMismatch, HostringError
from hostring.group.contract import contract, neighbours
from hostring.group.group import Group
from hostring.topologies.rules import read_rules
from hostring.topologies.schedule import Schedule, batches, offsets, split_evenly
from hostring.tuning.agreement import agree

_JOINED: Final = 1 << 12  # elements up to which an array is joined with others: more are not worth two copies
_MOST_JOINED: Final = 1 << 17  # elements of a joined buffer
_DECISION_ROUND: Final = 1 << 20  # the rounds of a decision's second half, apart from those of its first


class Comm(Caller):
    """A group of ranks that reduce and exchange arrays, with the same bits on every rank. Made by `hostring.init`.

    Every rank calls the same collectives in the same order. A call on two threads is carried out in a defined order;
    calls with `async_op=True` return a `Work` at once and are carried out first in, first out.

    Attributes:
        rank: this process's index. world_size: how many there are.
        order: the declared fold order; wire: what float32 contributions are rounded to; topology: what was asked for.
        counters: see `Counters`.
    """

    def __init__(self, group: Group, *, topology: str, order: str, timeout: float, wire: str = "float32") -> None:
        super().__init__(group, topology=topology, order=order, wire=wire, timeout=timeout)
        try:
            agree(self)
        except BaseException as exc:
            self.abort(f"it could not start: {exc}")
            raise

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

    def _all_reduce(self, x: Any, op: str, timeout: float | None, detail: int | None = None) -> Any:
        started = perf_counter()
        adapter = ADAPTERS.get(type(x)) or adapter_for(x)
        view = adapter.view(x)
        if view is not None and not (self._narrows and view.dtype == FLOAT32):
            program = self._programs.get((view.size, view.dtype, op, detail))
            if program is not None and (direct := program.direct) is not None:
                self._run_direct(
                    direct, view if program.carried is None else view.view(program.carried), None, timeout, started
                )
                if op == "avg":
                    divide(view, self.world_size)
                return x
        dtype = adapter.dtype(x) if view is None else view.dtype
        n_elements = math.prod(x.shape) if view is None else view.size
        check_op(op, dtype)
        wire = wire_dtype(dtype)
        if self.world_size == 1:
            return self._alone("all_reduce", x)
        own = self._travels_as(dtype)
        if view is not None and own == dtype:
            planner = self._planner
            whole = (
                planner.all_reduce(n_elements, wire, op, None, detail)
                if wire is dtype
                else planner.narrow(n_elements, dtype, op, detail)
            )
            if whole is not None:
                self._run(whole, Buffers(view.view(carrier(dtype)), NOTHING), timeout, started)
                return self._finish_in_place(view, x, op)
        data, raw = self._stage(adapter, x, view, wire, own, in_place=True)
        program = self._planner.all_reduce(n_elements, wire, op, None if raw is None else own, detail)
        if (direct := program.direct) is not None:
            staged = perf_counter()
            self.counters.phases[STAGE] += staged - started
            self._run_direct(direct, data, raw, timeout, staged)
        else:
            self._run(program, Buffers(data, NOTHING, raw), timeout, started)
        return self._finish_in_place(data, x, op) if data is view else self._unstage(adapter, data, x, op)

    def _finish_in_place(self, data: Array, x: Any, op: str) -> Any:
        if op == "avg":
            divide(data, self.world_size)
        return x

    def all_reduce_coalesced(
        self, xs: Iterable[Any], op: str = "sum", *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Like `all_reduce` of each of several arrays, in one call: small ones together take the time of one.

        Args:
            xs: arrays of any shape, library and device that don't overlap; as many, and each with as many elements, on every rank.
                Either all are floats of 32 bits or less, which may differ in dtype, or all have one dtype. Changed in place where
                they can be.
            timeout: seconds for each of the operations that this takes.

        Returns:
            a list of what `all_reduce` returns for each. The bits are the same.

        Raises:
            TypeError, ValueError: as `all_reduce`, or these dtypes can't be folded together; nothing was sent.
            CollectiveMismatch: the arrays have other numbers of elements on another rank.

        Arrays of up to 4096 elements travel together, where that changes no bit: not with order="ring", nor, of floats, with
        another wire than float32. Cost: two copies of those, and an all_reduce of each larger one.
        """
        arrays = list(xs)
        dtypes = {adapter_for(x).dtype(x) for x in arrays}
        for dtype in dtypes:
            check_op(op, dtype)
        if len({wire_dtype(dtype) for dtype in dtypes}) > 1:
            names = ", ".join(sorted(dtype.name for dtype in dtypes))
            raise TypeError(
                f"all_reduce_coalesced: arrays of {names} are not folded in one dtype; make a call for each"
            )
        joint = dtypes.pop() if len(dtypes) == 1 else FLOAT32
        return self._start("all_reduce", lambda: self._all_reduce_coalesced(arrays, joint, op, timeout), async_op)

    def _all_reduce_coalesced(self, arrays: list[Any], dtype: DType, op: str, timeout: float | None) -> list[Any]:
        sizes = tuple(math.prod(x.shape) for x in arrays)
        detail = zlib.crc32(repr(sizes).encode()) or 1 if len(sizes) > 1 else None
        together = self.order != "ring" and not (self._narrows and wire_dtype(dtype) == FLOAT32)
        for batch in batches(sizes, _JOINED if together else 0, _MOST_JOINED):
            results = self._all_reduce_joined([arrays[k] for k in batch], dtype, op, timeout, detail)
            for k, result in zip(batch, results, strict=True):
                arrays[k] = result
        return arrays

    def _all_reduce_joined(
        self, arrays: list[Any], dtype: DType, op: str, timeout: float | None, detail: int | None
    ) -> list[Any]:
        """An all-reduce of arrays one after the other in one buffer of `dtype`; of one alone where it is."""
        if len(arrays) == 1:
            return [self._all_reduce(arrays[0], op, timeout, detail)]
        if self.world_size == 1:
            self._alone("all_reduce", None)
            return arrays
        started = perf_counter()
        buffer, pieces = self._buffer_for(tuple(math.prod(x.shape) for x in arrays), dtype)
        adapters = [adapter_for(x) for x in arrays]
        views = [adapter.view(x) for adapter, x in zip(adapters, arrays, strict=True)]
        for adapter, x, view, piece in zip(adapters, arrays, views, pieces, strict=True):
            if view is not None and view.dtype == dtype:
                np.copyto(piece, view)
            else:
                adapter.stage(x, piece)
        self.counters.phases[STAGE] += perf_counter() - started
        self._all_reduce(buffer, op, timeout, detail)
        started = perf_counter()
        for k, (adapter, x, view, piece) in enumerate(zip(adapters, arrays, views, pieces, strict=True)):
            if view is not None and view.dtype == dtype:
                np.copyto(view, piece)
            else:
                arrays[k] = adapter.unstage(piece, x)
        self.counters.phases[STAGE] += perf_counter() - started
        return arrays

    def reduce(
        self, x: Any, root: int = 0, op: str = "sum", *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Like `all_reduce`, but only `root` gets the result; `x` of the others is left as it is and returned."""
        root = self._check_rank(root, "root")
        self._check(x, op)
        return self._start("reduce", lambda: self._reduce(x, root, op, timeout), async_op)

    def _reduce(self, x: Any, root: int, op: str, timeout: float | None) -> Any:
        started = perf_counter()
        adapter = adapter_for(x)
        if self.world_size == 1:
            return self._alone("reduce", x)
        view = adapter.view(x)
        dtype = adapter.dtype(x)
        wire, own = wire_dtype(dtype), self._travels_as(dtype)
        data, raw = self._stage(adapter, x, view, wire, own)
        program = self._planner.reduction("reduce", data.size, data.dtype, op, None if raw is None else own, root)
        self._run(program, Buffers(data, NOTHING, raw), timeout, started)
        if self.rank != root:
            return x
        return self._finish_in_place(data, x, op) if data is view else self._unstage(adapter, data, x, op)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
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
        wire, own = wire_dtype(dtype), self._travels_as(dtype)
        width = math.prod(x.shape[1:])
        data, raw = self._stage(adapter, x, view, wire, own if self.world_size > 1 else dtype)
        counts = tuple(r * width for r in rows)
        if _parts_blocks(own, counts):
            raw = None
        check_out("reduce_scatter", out, counts[self.rank], dtype)
        result = np.empty(counts[self.rank], wire)
        if self.world_size == 1:
            result[...] = data
            self._alone("reduce_scatter", x)
        else:
            program = self._planner.reduction(
                "reduce_scatter", data.size, wire, op, None if raw is None else own, counts
            )
            self._run(program, Buffers(data, result, raw), timeout, started)
        if op == "avg":
            divide(result, self.world_size)
        return self._hand_out(adapter, result, x, (rows[self.rank], *x.shape[1:]), out)

    # ------------------------------------------------------------------ data movement

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Give `x` of `root` to all. Floats are rounded to each rank's own dtype; other dtypes must agree. In place."""
        root = self._check_rank(root, "root")
        adapter_for(x).dtype(x)
        return self._start("broadcast", lambda: self._broadcast(x, root, timeout), async_op)

    def _broadcast(self, x: Any, root: int, timeout: float | None) -> Any:
        started = perf_counter()
        if self.world_size == 1:
            return self._alone("broadcast", x)
        adapter = adapter_for(x)
        data, view = self._lend(adapter, x)
        program = self._planner.movement("broadcast", data.size, adapter.dtype(x), root)
        self._run(program, Buffers(data, NOTHING), timeout, started)
        return x if view is not None or self.rank == root else self._unstage(adapter, data.view(program.dtype), x, "")

    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
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
        self,
        x: Any,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Like `all_gather`, but only `root` gets the result; the others get None."""
        root = self._check_rank(root, "root")
        shape, sizes = self._gathered(x, counts)
        result = shape if self.rank == root else None
        return self._start("gather", lambda: self._move("gather", x, (root, sizes), result, out, timeout), async_op)

    def scatter(
        self,
        x: Any,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Give part r of `x` of `root` along the first dimension to rank r.

        Args:
            x: on `root`, shape (world_size, …), or (sum(counts), …) with `counts`. Elsewhere ignored; None will do.
            out: where the part goes. Needed on every rank but `root`, which alone knows the shape.
        """
        root = self._check_rank(root, "root")
        x = x if self.rank == root else None
        like = out if x is None else x
        if like is None:
            raise ValueError(
                f"scatter: root {root} must bring an array"
                if self.rank == root
                else f"scatter: rank {self.rank} is not root and must say by out= where its part goes"
            )
        adapter_for(like).dtype(like)
        ones = [1] * self.world_size if counts is None else counts
        rows = self._rows(like, ones) if x is not None else [operator.index(c) for c in ones]
        if len(rows) != self.world_size or (x is None and counts is not None and like.shape[:1] != (rows[self.rank],)):
            raise ValueError(f"scatter: out of rank {self.rank} has shape {tuple(like.shape)}, counts={rows}")
        width = math.prod(like.shape if x is None and counts is None else like.shape[1:])
        shape = tuple(like.shape) if x is None else (() if counts is None else (rows[root],)) + tuple(like.shape[1:])
        detail = root, tuple(width * r for r in rows)
        return self._start("scatter", lambda: self._move("scatter", x, detail, shape, out, timeout, like), async_op)

    def all_to_all(
        self,
        x: Any,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
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

    def _all_to_all(
        self, x: Any, rows: list[int], recv_counts: Sequence[int] | None, uneven: bool, out: Any, timeout: float | None
    ) -> Any:
        n, mine = self.world_size, np.array(rows, np.int64)
        matrix = (
            self._move("all_gather", mine, (n,) * n, (n, n), None, timeout)
            if uneven and n > 1
            else np.tile(mine, (n, 1))
        )
        received = [int(r) for r in matrix[:, self.rank]]
        if recv_counts is not None and received != [operator.index(c) for c in recv_counts]:
            what = f"all_to_all: rank {self.rank} expects {list(recv_counts)} rows, the others send it {received}"
            raise self._fail(CollectiveMismatch(what, self.rank))
        width = math.prod(x.shape[1:])
        counts = tuple(tuple(int(r) * width for r in row) for row in matrix)
        return self._move("all_to_all", x, counts, (sum(received), *x.shape[1:]), out, timeout)

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return when every rank has called it."""
        return self._start("barrier", lambda: self._barrier(timeout), async_op)

    def _barrier(self, timeout: float | None) -> None:
        if self.world_size == 1:
            self._alone("barrier", None)
            return
        program = self._planner.movement("barrier", 0, BY_NAME["uint8"], 0)
        self._run(program, Buffers(NOTHING, NOTHING), timeout, perf_counter())

    def decide(self, x: Any, choose: Callable[[Array], Array], root: int = 0, *, timeout: float | None = None) -> Array:
        """One collective in which `root` decides for all: everybody contributes `x`, everybody gets the bytes that `root` chose.

        Args:
            x: a numpy array, the same shape and dtype on every rank.
            choose: called on `root` alone with all contributions, shape (world_size, *x.shape); returns an array of the
                shape and dtype of `x`. What it raises is raised on every rank.

        Returns:
            what `choose` returned, bit for bit the same on every rank.
        """
        root = self._check_rank(root, "root")
        mine = np.asarray(x, adapter_for(x).dtype(x), order="C")
        result: Array = self._turns.run(self._decide, "decide", mine, choose, root, timeout)
        return result

    def _decide(self, x: Array, choose: Callable[[Array], Array], root: int, timeout: float | None) -> Array:
        started = perf_counter()
        stacked = np.empty((self.world_size if self.rank == root else 0, *x.shape), x.dtype)
        bits = carrier(x.dtype)
        flat = x.reshape(-1).view(bits)
        if self.world_size > 1:
            sizes = (root, (x.size,) * self.world_size)
            self._run(
                self._planner.movement("gather", x.size, x.dtype, sizes, "decide"),
                Buffers(flat, stacked.reshape(-1).view(bits)),
                timeout,
                started,
                count=False,
            )
        else:
            stacked[0] = x
            self._alone("decide", x)
        decision = np.empty_like(x)
        if self.rank == root:
            try:
                chosen = np.asarray(choose(stacked), x.dtype)
                if chosen.shape != x.shape:
                    raise ValueError(f"it chose an array of shape {chosen.shape}, x has {x.shape}")
                decision[...] = chosen
            except Exception as exc:
                raise self._fail(HostringError(f"decide: root {root} could not choose: {exc!r}", root)) from exc
        if self.world_size > 1:
            program = self._planner.movement("broadcast", x.size, x.dtype, root, "decide", _DECISION_ROUND)
            chosen_at = perf_counter()
            left = (self.timeout if timeout is None else timeout) - (chosen_at - started)
            self._run(program, Buffers(decision.reshape(-1).view(bits), NOTHING), left, chosen_at)
        return decision

    # ------------------------------------------------------------------ point to point

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Send `x` to rank `dst`. Returns when `x` may be changed again; large messages wait for the receiver.

        Two ranks may both send first. Returns None, or a `Work` with `async_op`, which progresses without `wait`.
        """
        dst, tag = self._check_peer(dst, "dst"), check_tag(tag)
        self._alive()
        adapter = adapter_for(x)
        dtype, view = adapter.dtype(x), adapter.view(x)
        data = np.empty(math.prod(x.shape), dtype) if view is None else view
        if view is None:
            adapter.stage(x, data)
        work = self._messenger.send(data, dst, tag, self.timeout if timeout is None else timeout, async_op, owner=x)
        return work if async_op else self._finish(work)

    def recv(
        self, x: Any, src: int | None = None, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Receive into `x` the next message with `tag` from rank `src`, or from any rank when it is None.

        Floats are rounded to the dtype of `x`. Returns `x` (or a new array where `x` is immutable), or a `Work` with
        `async_op`, whose `src` says who sent it.

        Raises:
            CollectiveMismatch: the message has another number of elements, or a dtype that `x` can't take.
        """
        if src is not None:
            src = self._check_peer(src, "src")
        tag = check_tag(tag)
        self._alive()
        adapter = adapter_for(x)
        dtype, view = adapter.dtype(x), adapter.view(x)
        data = np.empty(math.prod(x.shape), dtype) if view is None else view
        put_back = None if view is not None else lambda: adapter.unstage(data, x)
        work = self._messenger.recv(
            data,
            src,
            tag,
            self.timeout if timeout is None else timeout,
            x if view is not None else None,
            put_back,
            async_op,
        )
        return work if async_op else self._finish(work)

    def _finish(self, work: Any) -> Any:
        try:
            return work.wait()
        except BaseException as exc:
            raise self._fail(exc) from exc

    # ------------------------------------------------------------------ the group itself

    def split(
        self, color: int | None, key: int | None = None, *, topology: str | None = None, order: str | None = None
    ) -> Comm | None:
        """Make a group of all ranks that name the same `color`, with links of its own, ranked by `key`, then by rank here.

        Every rank of this group must call it. Returns None for a rank whose `color` is None.

        Raises:
            ValueError: `color` is negative, or `topology` and `order` don't go together; nothing was sent.
        """
        topology, order = topology or self.topology, order or self.order
        read_rules(topology, order)
        if color is not None and operator.index(color) < 0:
            raise ValueError(f"color={color} must be 0 or more, or None to join no group")
        pairs = self.all_gather(np.array([-1 if color is None else color, self.rank if key is None else key], np.int64))
        members = sorted(
            (r for r in range(self.world_size) if pairs[r][0] == color), key=lambda r: (int(pairs[r][1]), r)
        )
        name = f"{self._seq}.{color}"
        if color is None:
            self._exchange(b"")
            return None
        group = self._group.subgroup(
            name,
            members.index(self.rank),
            len(members),
            neighbours=neighbours(topology, order),
            contract=contract(topology, order, self.wire),
            exchange=lambda payload: [all_of_them[r] for all_of_them in [self._exchange(payload)] for r in members],
        )
        return Comm(group, topology=topology, order=order, wire=self.wire, timeout=self.timeout)

    def _exchange(self, payload: bytes) -> list[bytes]:
        """Give a few bytes to all ranks of this group."""
        sizes = [int(s[0]) for s in self.all_gather(np.array([len(payload)], np.int64))]
        joined = self.all_gather(np.frombuffer(payload, np.uint8), counts=sizes).tobytes()
        ends = np.cumsum([0, *sizes])
        return [joined[a:b] for a, b in pairwise(ends)]

    def turn(self, job: Callable[[], Any], *, what: str = "turn", async_op: bool = False) -> Any:
        """Carry out `job`, which calls blocking collectives of this group, as one: no other thread's call comes in between.

        Returns what `job` returns, or a `Work` with `async_op`. Inside, don't wait for this group's asynchronous calls.
        """
        return self._start(what, job, async_op)

    def rebuild(self, min_ranks: int = 1, *, timeout: float | None = None) -> Comm:
        """After a failure: make the group whole again, with the survivors and with processes that came back.

        Every survivor calls it; a process that comes back calls `hostring.init(rejoin=True)`. All known survivors are
        waited for, and as many more as it takes to be `min_ranks`. Ranks are ordered by the number they held or ask for,
        then by arrival, and numbered without gaps: a process that comes back as rank k stands where rank k stood.
        Frames of the old group can't be mistaken for the new one's: it has links and an epoch of its own.

        Returns:
            The new group. This one is closed.

        Raises:
            RendezvousError: too few ranks came within `timeout` (the group's own when None). It may be called again.
            ValueError: the group has no store: it was split from another, or started by `RING_CONFIG`.
        """
        if self._released:
            self._alive()
        self._group.check_store()
        with self._lock:
            self._closed = self._closed or "rebuilt"
        if self._control.cause is None:
            self._control.flood(HostringError(f"rank {self.rank} rebuilds the group", self.rank))
        self._messenger.close(0.0)
        self._turns.close(1.0)
        group = self._group.reform(
            self._control.alive,
            min_ranks=min_ranks,
            timeout=self.timeout if timeout is None else timeout,
            neighbours=neighbours(self.topology, self.order),
            contract=contract(self.topology, self.order, self.wire),
        )
        self._released = True
        return Comm(group, topology=self.topology, order=self.order, wire=self.wire, timeout=self.timeout)

    def close(self) -> None:
        """Work off what was accepted, say goodbye, and close all links. Idempotent. Other ranks that still wait for this one fail."""
        with self._lock:
            if self._released or self._closing:
                return
            self._closing = True
        if not self._turns.close(self.timeout):
            self.abort(f"what it had accepted was not done {self.timeout:.1f} s after it closed the group")
        with self._lock:
            if self._released:  # aborted meanwhile
                return
            self._closed, self._released = self._closed or "closed", True
        self._messenger.close()
        self.recorder.dump()
        self._control.farewell()
        self._group.close()

    def abort(self, reason: str = "aborted by the user") -> None:
        """End the group now, on every rank: calls under way and later ones raise `reason`. May be called from any thread."""
        with self._lock:
            if self._released:
                return
            self._closed, self._released = f"aborted: {reason}", True
        self._control.flood(HostringError(f"rank {self.rank} aborted the group: {reason}", self.rank))
        for link in self._group.data.values():
            link.abort()
        self._messenger.abort(HostringError(f"rank {self.rank} aborted the group: {reason}", self.rank))
        self._messenger.close(1.0)
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
        """Payload bytes that this rank sends in one call, from the schedule alone, when all ranks bring the same dtype, and for
        any operator but avg, whose results are divided before they are rounded.

        Args:
            n_elements: of the buffer of all_reduce, reduce, reduce_scatter, broadcast and all_to_all, evenly divided where it is
                divided; of one rank's share of all_gather, gather, scatter and decide.
        """
        if self.world_size == 1:
            return 0
        own = BY_NAME[dtype] if isinstance(dtype, str) else np.dtype(dtype)
        wire, n = wire_dtype(own), self.world_size
        if collective == "all_reduce":
            raw, result = self._travels_as(own), own if own in (FLOAT16, BFLOAT16) and self.wire == "float32" else wire
            return _payload(self._planner.all_reduce_schedule(n_elements, wire), raw, wire, result)
        shares = (n_elements,) * n
        parts = tuple(stop - start for start, stop in split_evenly(n_elements, n))
        steps: dict[str, list[tuple[str, Any]]] = {
            "reduce": [("reduce", root)],
            "reduce_scatter": [("reduce_scatter", parts)],
            "broadcast": [("broadcast", root)],
            "all_gather": [("all_gather", shares)],
            "gather": [("gather", (root, shares))],
            "scatter": [("scatter", (root, shares))],
            "all_to_all": [("all_to_all", (parts,) * n)],
            "barrier": [("barrier", 0)],
            "decide": [("gather", (root, shares)), ("broadcast", root)],
        }
        if collective not in steps:
            raise ValueError(f"collective={collective!r} is unknown; use all_reduce, {', '.join(steps)}")
        moved = own
        if collective.startswith("reduce"):
            moved, own = wire, self._travels_as(own)
            if collective == "reduce_scatter" and _parts_blocks(own, parts):
                own = wire
        schedules = (self._planner.schedule(name, n_elements, detail, moved) for name, detail in steps[collective])
        return sum(_payload(schedule, own, moved, moved) for schedule in schedules)


def _payload(schedule: Schedule, raw: DType, wire: DType, result: DType) -> int:
    sends = (send for round_ in schedule.rounds for send in round_.sends)
    return sum(nbytes_of(len(s.what), raw if s.raw else result if s.result else wire) for s in sends)


def _parts_blocks(own: DType, counts: Sequence[int]) -> bool:
    """Whether chunks of `counts` elements begin inside of the blocks that `own` consists of: such contributions travel as float32."""
    return own == MXINT8 and any(start % BLOCK for start, stop in offsets(counts) if start < stop)
