"""What every call of a group does, whatever the collective: its turn, its number, its failure, its staging."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final

import numpy as np

from hostring.arrays import mxint8
from hostring.arrays.adapter import Adapter
from hostring.arrays.casting import cast, copy
from hostring.arrays.dtypes import BFLOAT16, FLOAT32, MXINT8, WIRES, Array, DType, carrier, check_op, nbytes_of
from hostring.arrays.fold import divide
from hostring.arrays.staging import adapter_for
from hostring.engine import fork
from hostring.engine.choice import Tuner
from hostring.engine.control import Control, again
from hostring.engine.counters import STAGE, Counters
from hostring.engine.engine import Engine
from hostring.engine.frames import numbered
from hostring.engine.messenger import Messenger
from hostring.engine.planner import Planner
from hostring.engine.program import Direct, Program
from hostring.engine.receiving import Pipe
from hostring.engine.recorder import Recorder
from hostring.engine.sending import Buffers
from hostring.engine.work import Turns
from hostring.errors import GroupClosedError, HostringError, PeerLostError
from hostring.group.group import Group
from hostring.topologies.schedule import offsets

NOTHING: Final = np.empty(0, np.uint8)
_MOST_LISTS: Final = 16  # lists of arrays whose pieces are remembered
_BYTE: Final = NOTHING.dtype
_SHARED_SPINS: Final = (
    32  # turns given to others: 3 and 4 ranks on 2 cores take half the time that they take with none, no less with more
)
_FEW: Final = 1 << 12  # elements that numpy rounds before another library has begun
_SPINS: Final = 2000  # about 2 ms: longer than a layer's lanes differ, shorter than anyone would mind


class Caller:
    """The state of one group at one rank, and the steps that its collectives share."""

    def __init__(self, group: Group, *, topology: str, order: str, wire: str, timeout: float) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.order, self.wire, self.topology, self.timeout = order, wire, topology, timeout
        self._lossy, self._narrows = WIRES[wire], wire != "float32"
        pipes = {peer: Pipe(link) for peer, link in group.data.items()}
        self.counters = Counters(pipes)
        self._group = group
        self._tuner = Tuner(topology, order, group.world_size)
        self._control = Control(group.rank, group.control)
        self.recorder = Recorder(group.name, group.rank, group.world_size)
        self._engine = Engine(self._control, self.counters, self.recorder, *_spins(group))
        self._planner = Planner(
            group.rank, group.world_size, self._tuner, order, group.epoch, pipes, self.counters, wire
        )
        self._programs = self._planner.programs
        self._buffer = NOTHING  # of arrays that are joined
        self._pieces: dict[tuple[tuple[int, ...], DType], tuple[Array, list[Array]]] = {}
        self._messenger = Messenger(group.rank, group.p2p, self._control, self.counters, group.epoch)
        self._turns = Turns(f"hostring-{group.name}-{group.rank}")
        self._seq = 0
        self._closed: str | None = None  # why no call is accepted any more
        self._closing = self._released = False  # whether links and store are given up
        self._lock = threading.Lock()
        if group.world_size > 1:
            fork.watch(self)

    def forsake(self) -> None:
        """In a forked child: refuse every call, and let go of the links. Locks may be held by threads that are not there."""
        refusal = fork.refusal(self.rank)
        self._control.cause = refusal
        self._turns, self._lock = Turns(f"hostring-{self._group.name}-{self.rank}"), threading.Lock()
        self._messenger.forsake(refusal)
        self._closed, self._released = "left", True
        fork.let_go(self._group.links)

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
            raise self._fail(exc, program, staged) from exc
        self.counters.phases[STAGE] += staged - started
        if count:
            self._seq += 1
            self.counters.calls[program.call.collective] += 1

    def _run_direct(
        self, direct: Direct, data: Array, raw: Array | None, timeout: float | None, started: float
    ) -> None:
        """`_run` for the short form."""
        if self._closed is not None or self._control.cause is not None:
            self._alive()
        seq = self._seq
        try:
            self._engine.run_direct(direct, data, raw, seq, self.timeout if timeout is None else timeout, started)
        except BaseException as exc:
            raise self._fail(exc, direct.program, started) from exc
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

    def _fail(self, exc: BaseException, program: Program | None = None, started: float = 0.0) -> BaseException:
        """Poison the group with the first cause, tell everyone, and return what to raise here."""
        if self._closed is not None and self._control.cause is None:
            return GroupClosedError(f"rank {self.rank} has {self._closed} this group while a call was under way")
        if isinstance(exc, HostringError):
            cause = self._control.settle(exc)
            if cause is exc and isinstance(exc, PeerLostError) and exc.rank is not None and program is not None:
                cause = PeerLostError(exc.rank, f"{exc.reason}, in {program.call.collective} {numbered(self._seq)}")
        else:
            cause = HostringError(f"rank {self.rank} left a call by {type(exc).__name__}: {exc}", self.rank)
        self._control.flood(cause)
        self._messenger.abort(cause)
        if program is not None:
            self.recorder.record(
                (
                    program.subject,
                    self._seq,
                    started,
                    perf_counter(),
                    0.0,
                    0.0,
                    -1 if cause.rank is None else cause.rank,
                )
            )
        self.recorder.dump(str(cause))
        return again(cause) if isinstance(exc, HostringError) else exc

    def _travels_as(self, dtype: DType) -> DType:
        """The dtype of a contribution of `dtype` on its way."""
        return self._lossy if self._narrows and dtype == FLOAT32 else dtype

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
        if self._closed is not None or self._control.cause is not None:
            self._alive()  # a call that can't begin must not round its array
        if view is not None and view.dtype == wire and in_place:
            return view, self._round(view, 0)
        n_elements = math.prod(x.shape) if view is None else view.size
        data = self._planner.room(n_elements, wire)
        if view is None:
            adapter.reuse(x, data)
        if view is not None and view.dtype == BFLOAT16:
            np.copyto(data, view)  # faster than any library's own
        else:
            adapter.stage(x, data)
        if own != wire and adapter.dtype(x) == wire:
            return data, self._round(data, data.nbytes)
        return data, view.view(carrier(view.dtype)) if view is not None and view.dtype != wire else None

    def _round(self, data: Array, after: int) -> Array:
        """Round `data` to what it travels as, in place, and return it so, in reused memory behind the first `after` bytes."""
        if self._lossy == MXINT8:
            payload = self._planner.room(nbytes_of(data.size, MXINT8), _BYTE, after)
            mxint8.round_to_blocks(data, payload)
            return payload
        raw = self._planner.room(data.size, BFLOAT16, after)
        if data.size <= _FEW:
            copy(raw, data)
        else:
            cast(raw, data)
        np.copyto(data, raw)
        return raw.view(carrier(BFLOAT16))

    def _buffer_for(self, sizes: tuple[int, ...], dtype: DType) -> tuple[Array, list[Array]]:
        """A buffer for arrays of these many elements, one after the other, and its pieces. It serves again, and no staging uses it."""
        known = self._pieces.get((sizes, dtype))
        if known is not None:
            return known
        n_elements = sum(sizes)
        nbytes = n_elements * dtype.itemsize
        if nbytes > self._buffer.nbytes:
            self._pieces.clear()
            self._buffer = np.empty(nbytes, np.uint8)
        if len(self._pieces) >= _MOST_LISTS:
            self._pieces.clear()
        whole = self._buffer[:nbytes].view(dtype)
        known = self._pieces[sizes, dtype] = whole, [whole[a:b] for a, b in offsets(sizes)]
        return known

    def _unstage(self, adapter: Adapter, data: Array, x: Any, op: str) -> Any:
        before = perf_counter()
        if op == "avg":
            divide(data, self.world_size)
        result = adapter.unstage(data, x)
        self.counters.phases[STAGE] += perf_counter() - before
        return result

    def _lend(self, adapter: Adapter, x: Any) -> tuple[Array, Array | None]:
        """`x` as a flat host array in its own (carrier) dtype: its own memory when `view` is not None."""
        view = adapter.view(x)
        if view is None:
            data = self._planner.room(math.prod(x.shape), adapter.dtype(x))
            adapter.reuse(x, data)
            adapter.stage(x, data)
        else:
            data = view
        return data.view(carrier(data.dtype)), view

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
        """Data that moves from `x` into a result of `shape` (None: this rank gets no result), into `out` when it is given."""
        started = perf_counter()
        like = x if like is None else like
        adapter = adapter_for(like)
        dtype = adapter.dtype(like)
        if shape is not None:
            check_out(collective, out, math.prod(shape), dtype)
        data = NOTHING.view(np.uint8)[:0] if x is None else self._lend(adapter_for(x), x)[0]
        result = np.empty(0, carrier(dtype))
        target, flat = None, None
        if shape is not None:
            target = out if out is not None else adapter.empty(like, shape)
            flat = None if target is None else adapter_for(target).view(target)
            result = (np.empty(math.prod(shape), dtype) if flat is None else flat).view(carrier(dtype))
        if self.world_size == 1:
            result[...] = data
            self._alone(collective, x)
        else:
            n_elements = (
                data.size
                if collective in ("all_gather", "gather")
                else sum(detail[1])
                if collective == "scatter"
                else 0
            )
            uneven = (
                collective in ("all_gather", "gather")
                and len(set(detail if collective == "all_gather" else detail[1])) > 1
            )
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
            return adapter.unstage(result, x, tuple(shape))
        return adapter_for(out).unstage(result, out)

    def _gathered(self, x: Any, counts: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        adapter_for(x).dtype(x)
        n_elements = math.prod(x.shape)
        if counts is None:
            return (self.world_size, *x.shape), (n_elements,) * self.world_size
        rows = [operator.index(c) for c in counts]
        mine = x.shape[0] if len(x.shape) else None
        if len(rows) != self.world_size or min(rows) < 0 or mine != rows[self.rank]:
            brings = "a 0-d array" if mine is None else f"{mine} rows"
            raise ValueError(
                f"counts={rows} must name the rows of each of {self.world_size} ranks; rank {self.rank} brings {brings}"
            )
        width = math.prod(x.shape[1:])
        return (sum(rows), *x.shape[1:]), tuple(c * width for c in rows)

    def _rows(self, x: Any, counts: Sequence[int] | None) -> list[int]:
        total = x.shape[0] if len(x.shape) else 0
        if counts is None:
            if total % self.world_size or not len(x.shape):
                raise ValueError(
                    f"{total} rows don't divide evenly over {self.world_size} ranks; say by counts how many each gets"
                )
            return [total // self.world_size] * self.world_size
        rows = [operator.index(c) for c in counts]
        if len(rows) != self.world_size or sum(rows) != total or min(rows) < 0:
            raise ValueError(f"counts={rows} must be {self.world_size} numbers that add up to {total} rows")
        return rows

    def _check(self, x: Any, op: str) -> None:
        check_op(op, adapter_for(x).dtype(x))

    def _check_rank(self, rank: Any, name: str) -> int:
        """`rank` as a plain int: a numpy integer has another `repr`, and ranks compare checksums of what was asked for."""
        number = operator.index(rank)
        if not 0 <= number < self.world_size:
            raise ValueError(f"{name}={rank} is no rank of this group; it has ranks 0 to {self.world_size - 1}")
        return number

    def _check_peer(self, rank: Any, name: str) -> int:
        number = self._check_rank(rank, name)
        if number == self.rank:
            raise ValueError(f"{name}={rank} is this rank itself")
        return number


def check_tag(tag: Any) -> int:
    """`tag` as a plain int. Raises `ValueError` for one that has no place in a header."""
    number = operator.index(tag)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"tag={tag} is not in 0 … 2**64 - 1")
    return number


def check_out(collective: str, out: Any, n_elements: int, dtype: DType) -> None:
    """Refuse an `out` that can't take the result, before a byte moves."""
    if out is None:
        return
    theirs = adapter_for(out).dtype(out)
    if theirs != dtype:
        raise TypeError(f"{collective}: out is {theirs}, the result is {dtype}; pass an out of that dtype")
    if math.prod(out.shape) != n_elements:
        raise ValueError(f"{collective}: out has {math.prod(out.shape)} elements, the result has {n_elements}")


def _spins(group: Group) -> tuple[int, bool]:
    """How often to look before sleeping, and whether ranks share cores: then every look gives way to the others.

    Going to sleep and being woken takes longer than a small collective; a core that only spins keeps the others from theirs.
    """
    me = group.members[group.rank]
    here = [m for m in group.members if m is not None and me is not None and m.host_id == me.host_id]
    if len({m.pid for m in here}) < len(here):  # ranks that share one interpreter take turns anyway
        return 0, True
    cores = {core for m in here for core in m.cores}
    quota = min((m.cpu_quota for m in here if m.cpu_quota is not None), default=float("inf"))
    shared = len(here) > min(len(cores), quota)
    return (_SHARED_SPINS if shared else _SPINS), shared
