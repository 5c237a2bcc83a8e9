"""A schedule bound to links and scratch: everything about a call that does not change from one call to the next.

A decode loop repeats the same few shapes for ever, so headers, scratch views and fold steps are made once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from .casting import bound_cast, cast
from .dtypes import BFLOAT16, CODES, DTYPES, FLOAT16, FLOAT32, NAMES, Array, DType, carrier, kind_code
from .errors import CollectiveMismatch, ProtocolError
from .fold import Expression, Fold2, fold_functions, narrow_sum
from .link import Buffer, Link
from .schedule import DATA, OUT, Fold, Range, Recv, Round, Schedule, Send
from .wire import EXPECTED_BYTES, HEADER_BYTES, SEQ, SEQ_OFFSET, Call, decode, payload_fields

_ALIGN: Final = 64
_NARROW: Final = (FLOAT16, BFLOAT16)

Place: TypeAlias = "tuple[str, int]"


class Pipe:
    """A link, and what was read from it too early: bytes that belong to the next message."""

    __slots__ = ("_ahead", "link", "recv", "recv_all", "send", "waited")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.waited = 0.0  # seconds in which nothing came from there
        self.send = link.send
        self.recv: Callable[[Any], int] = link.recv_into
        self.recv_all: Callable[[Sequence[Any]], int] = link.recv_into_all
        self._ahead = b""

    def push_back(self, early: bytes) -> None:
        self._ahead = early + self._ahead
        if self._ahead:
            self.recv, self.recv_all = self._recv_ahead, lambda views: self._recv_ahead(views[0])

    def _recv_ahead(self, view: Buffer) -> int:
        into = memoryview(view).cast("B")
        n = min(len(self._ahead), len(into))
        into[:n] = self._ahead[:n]
        self._ahead = self._ahead[n:]
        if not self._ahead:
            self.recv, self.recv_all = self.link.recv_into, self.link.recv_into_all
        return n


@dataclass
class Buffers:
    """What the caller brings to one run: flat host arrays in the program's (carrier) dtype, and raw 16-bit contributions."""

    data: Array
    out: Array
    raw: Array | None = None


class Spot:
    """A piece of a buffer: fixed over scratch, or cut from what the caller brings."""

    __slots__ = ("fixed", "is_out", "start", "stop", "whole")

    def __init__(self, fixed: Array | None, is_out: bool, start: int, stop: int, whole: bool) -> None:
        self.fixed, self.is_out, self.start, self.stop, self.whole = fixed, is_out, start, stop, whole

    def array(self, b: Buffers) -> Array:
        if self.fixed is not None:
            return self.fixed
        base = b.out if self.is_out else b.data
        return base if self.whole else base[self.start : self.stop]

    def buffer(self, b: Buffers) -> Array:
        """The same as something that a socket takes: complex numbers as pairs."""
        array = self.array(b)
        return array.view(array.real.dtype) if array.dtype.kind == "c" else array


class Result:
    """A piece of the result on its way to ranks that will round it to 16 bits: rounded here, once for each dtype and run."""

    __slots__ = ("_at", "_program", "_rounded", "_seq", "_spot")

    def __init__(self, program: Program, spot: Spot, at: int) -> None:
        self._program, self._spot, self._at = program, spot, at
        self._seq = -1
        self._rounded: dict[DType, Array] = {}

    @staticmethod
    def nbytes(n_elements: int) -> int:
        """Room for both dtypes."""
        return len(_NARROW) * -(-2 * n_elements // _ALIGN) * _ALIGN

    def rounded(self, dtype: DType, b: Buffers) -> Array:
        if self._seq != self._program.seq:
            self._seq = self._program.seq
            self._rounded.clear()
        found = self._rounded.get(dtype)
        if found is None:
            wide = self._spot.array(b)
            at = self._at + _NARROW.index(dtype) * Result.nbytes(wide.size) // len(_NARROW)
            narrow: Array = np.frombuffer(self._program.results_block(), dtype, wide.size, at)
            cast(narrow, wide)
            found = self._rounded[dtype] = narrow.view(carrier(dtype))
        return found


class Message:
    """One message to send.

    Attributes:
        origin: where it came from, when it is only passed on: another rank's dtype is kept.
        result, asker: when it is a result for one rank, and that rank's contribution, whose dtype says what it will round to.
    """

    __slots__ = ("asker", "header", "is_raw", "origin", "result", "spot")

    def __init__(self, header: bytearray, spot: Spot, is_raw: bool, origin: Incoming | None) -> None:
        self.header, self.spot, self.is_raw, self.origin = header, spot, is_raw, origin
        self.result: Result | None = None
        self.asker: Incoming | None = None

    @property
    def rounded_to(self) -> DType | None:
        """The dtype of 16 bits that a result is sent in, if it is."""
        dtype = None if self.asker is None else self.asker.payload_dtype()
        return dtype if dtype in _NARROW else None

    @property
    def payload_nbytes(self) -> int:
        if self.origin is not None and self.origin.side is not None:
            return payload_nbytes(self.origin.header)
        return (self.spot.stop - self.spot.start) * 2 if self.rounded_to is not None else payload_nbytes(self.header)

    def buffers(self, b: Buffers) -> tuple[Any, Any]:
        if self.result is not None and (dtype := self.rounded_to) is not None:
            rounded, program = self.result.rounded(dtype, b), self.result._program
            return program.own_header(self.header[:EXPECTED_BYTES] + payload_fields(CODES[dtype], rounded.nbytes)), rounded
        if self.origin is not None and self.origin.side is not None:
            return self._passed_on(self.origin), self.origin.side[HEADER_BYTES:]
        if self.is_raw:
            assert b.raw is not None
            return self.header, b.raw if self.spot.whole else b.raw[self.spot.start : self.spot.stop]
        return self.header, self.spot.buffer(b)

    def _passed_on(self, origin: Incoming) -> bytearray:
        return origin.program.own_header(self.header[:EXPECTED_BYTES] + origin.header[EXPECTED_BYTES:])


class Sides:
    """Memory for payloads of another dtype than their program's. All programs of a group share it, since one runs at a time."""

    def __init__(self) -> None:
        self.block = bytearray()

    def reserve(self, nbytes: int, ahead: int = 1) -> bytearray:
        """The block, of at least `nbytes`, grown by the factor `ahead`: a block that is replaced lives on under older programs."""
        if nbytes > len(self.block):
            self.block = bytearray(max(nbytes, ahead * len(self.block)))
        return self.block


class Incoming:
    """One expected message: where it goes, and what its header must be.

    A payload of another dtype than expected (a bfloat16 rank among float16 ranks) goes through a side buffer and is
    converted; the next call then expects that dtype.
    """

    __slots__ = (
        "_at", "_checked", "_frame", "_got", "_home", "_place", "_size", "_target", "_view", "before", "done", "dtype", "header",
        "n_elements", "peer", "pipe", "program", "side", "spot",
    )  # fmt: skip

    def __init__(
        self, program: Program, recv: Recv, pipe: Pipe, header: bytearray, spot: Spot, home: tuple[bytearray, int] | None, place: Place
    ) -> None:
        self.program, self.peer, self.pipe, self.header, self.spot = program, recv.peer, pipe, header, spot
        self._place = place
        self.n_elements = spot.stop - spot.start
        self.dtype = program.dtype
        self.side: memoryview | None = None
        self.before: Incoming | None = None  # the message that comes first over the same link in this round
        self.done = False
        self._home = home
        self._got = 0
        self._checked = False
        self._expect(self.payload_dtype())

    def payload_dtype(self) -> DType:
        """What the message is expected to bring, or has brought."""
        return DTYPES[self.header[EXPECTED_BYTES]]

    def _expect(self, payload: DType) -> None:
        """Lay out where header and payload land, for a payload of dtype `payload`."""
        self._size = HEADER_BYTES + self.n_elements * payload.itemsize
        self._view: memoryview | None = None
        self.side = None
        if payload != self.dtype:
            self._frame, self._at = self.program.side(self._place, self.n_elements, payload.itemsize)
            self._view = self.side = memoryview(self._frame)[self._at : self._at + self._size]
        elif self._home is not None:
            self._frame, self._at = self._home
            self._view = memoryview(self._frame)[self._at : self._at + self._size]
        else:  # straight into the caller's memory, the header apart
            self._frame, self._at = bytearray(HEADER_BYTES), 0

    @property
    def in_one_piece(self) -> bool:
        """Whether header and payload land together, and the target is scratch."""
        return self._view is not None and self.spot.fixed is not None

    def landing(self) -> tuple[Incoming, memoryview, int, bytearray, int]:
        """(this message, where it lands, its size, the frame and where the header is in it)."""
        assert self._view is not None
        return self, self._view, self._size, self._frame, self._at

    def start(self, b: Buffers) -> None:
        self.done = self._checked = False
        self._got = 0
        # A message with a side buffer needs its target as well: its sender may have changed back to our dtype.
        self._target = self.spot.buffer(b) if self._view is None or (self.side is not None and self._home is None) else None

    def step(self) -> bool:
        """Read what is there. Returns whether anything came. Sets `done` when the message is complete."""
        got = self._got
        if got == 0:
            n = self.pipe.recv(self._view) if self._view is not None else self.pipe.recv_all((self._frame, self._target))
        else:
            n = self._step_on(got)
        if not n:
            return False
        self.took(n)
        return True

    def took(self, n: int) -> None:
        """Account for `n` more bytes of this message, and check its header as soon as it is there."""
        self._got = got = self._got + n
        if not self._checked and got >= HEADER_BYTES:
            if not self._frame.startswith(self.header, self._at):
                self._unexpected()
                return
            self._checked = True
        self.done = got == self._size

    def progress(self) -> str:
        """How far this message has come, for an error message."""
        return f"sent {self._got} of {self._size} bytes"

    def _step_on(self, got: int) -> int:
        if self._view is not None:
            return self.pipe.recv(self._view[got:])
        assert self._target is not None
        if got < HEADER_BYTES:
            return self.pipe.recv_all((memoryview(self._frame)[got:], self._target))
        return self.pipe.recv(self._target.view(np.uint8)[got - HEADER_BYTES :])

    def _unexpected(self) -> None:
        """The header is not the expected one: a call that does not match, or the same call with another payload dtype."""
        start = bytes(self._frame[self._at : self._at + HEADER_BYTES])
        theirs, ours = decode(start), decode(self.header)
        assert ours is not None
        if theirs is None:
            raise ProtocolError(f"rank {self.peer} sent bytes that are no hostring frame: {start[:16].hex()}…", self.peer)
        if start[:EXPECTED_BYTES] != bytes(self.header[:EXPECTED_BYTES]):
            sides = f"this rank calls {ours.describe_call()}; rank {self.peer} calls {theirs.describe_call()}"
            raise CollectiveMismatch(f"{sides}; they differ in: {ours.differs_from(theirs)}", self.peer)
        payload = DTYPES[theirs.payload_dtype] if theirs.payload_dtype < len(DTYPES) else None
        if payload is None or theirs.payload_nbytes != self.n_elements * payload.itemsize or kind_code(payload) != kind_code(self.dtype):
            mine = NAMES[CODES[self.dtype]]
            raise CollectiveMismatch(
                f"rank {self.peer} sent {theirs.describe()}; this rank can't take that as {self.n_elements} of {mine}", self.peer
            )
        self.program.changed = True  # it goes through a side buffer from now on
        received = start + self._payload_so_far()
        self.header = self.program.own_header(bytearray(start))
        self._expect(payload)
        self._take_over(received)

    def _payload_so_far(self) -> bytes:
        if self._view is not None:
            return bytes(self._view[HEADER_BYTES : self._got])
        assert self._target is not None
        return self._target.view(np.uint8)[: self._got - HEADER_BYTES].tobytes()

    def _take_over(self, received: bytes) -> None:
        """Put what was read under a wrong expectation where it belongs; the rest is the next message's."""
        mine, rest = received[: self._size], received[self._size :]
        self._got = len(mine)
        if self._view is not None:
            self._view[: len(mine)] = mine
        else:
            assert self._target is not None
            self._target.view(np.uint8)[: len(mine) - HEADER_BYTES] = np.frombuffer(mine[HEADER_BYTES:], np.uint8)
        self.pipe.push_back(rest)
        self._checked = True
        self.done = self._got == self._size

    def convert(self, b: Buffers) -> None:
        """Bring a payload of another dtype into place, rounding to nearest even where it must."""
        if not self.program.narrow:
            cast(self.spot.array(b).view(self.dtype), self.side_array())

    def side_array(self) -> Array:
        """The payload of another dtype, where it landed."""
        assert self.side is not None
        return np.frombuffer(self.side, self.payload_dtype(), self.n_elements, HEADER_BYTES)

    def bound_convert(self) -> Callable[[], Any] | None:
        """`convert` for a target in scratch, bound once and for all; None where nothing has to be converted."""
        assert self.spot.fixed is not None
        return None if self.side is None or self.program.narrow else bound_cast(self.spot.fixed, self.side_array())


@dataclass
class Step:
    """One fold of two pieces, or a copy. It may run when the round's first `needs` messages are there (see `Stage`)."""

    fold: Fold2 | None
    left: Spot
    right: Spot | None
    out: Spot
    needs: tuple[int, ...]
    after_sends: bool


@dataclass
class Stage:
    """One round, bound."""

    outgoing: list[tuple[int, Pipe, list[Message]]] = field(default_factory=list)
    incoming: list[Incoming] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Direct:
    """The short form of a program of one round that sends the whole of `DATA`, receives into scratch, and folds.

    That is every small all-reduce on a mesh. `Engine.run_direct` does it with the fewest operations.

    Attributes:
        sends: (send, header, bytes to send, peer, pipe).
        recvs: (message, its view, its size, its frame, offset of its header), in the order of ranks.
        casts: what brings payloads of another dtype into place.
        steps: (fold, left, right, out) in order, where None is the caller's array.
    """

    __slots__ = ("casts", "headers", "program", "recvs", "sends", "stage", "steps")

    def __init__(self, program: Program, stage: Stage) -> None:
        self.program, self.headers, self.stage = program, program.headers, stage
        self.sends = [
            (pipe.link.send, m.header, HEADER_BYTES + m.payload_nbytes, peer, pipe) for peer, pipe, (m,) in stage.outgoing
        ]
        self.recvs = [i.landing() for i in stage.incoming]
        self.casts = [c for i in stage.incoming if (c := i.bound_convert()) is not None]
        self.steps: list[tuple[Any, Array | None, Array | None, Array | None]] = [
            (s.fold, s.left.fixed, None if s.right is None else s.right.fixed, s.out.fixed) for s in stage.steps
        ]

    @staticmethod
    def of(program: Program) -> Direct | None:
        """The short form, or None where `program` has none."""
        if len(program.stages) != 1:
            return None
        stage = program.stages[0]
        simple = (
            all(len(messages) == 1 and messages[0].spot.whole for _, _, messages in stage.outgoing)
            and all(i.in_one_piece and i.before is None for i in stage.incoming)
            and all(
                s.fold is not None and all(x is None or x.fixed is not None or (x.whole and not x.is_out) for x in (s.left, s.right, s.out))
                for s in stage.steps
            )
        )
        return Direct(program, stage) if simple and stage.steps else None


class Program:
    """See the module. `runs` counts completed runs; what each run moves is in `traffic`, by peer.

    Attributes:
        narrow: contributions are 16-bit floats, and folded as such: the bits are those of folding in float32 and rounding, and
            three casts are saved. Only a sum of two can be had so.
    """

    def __init__(
        self, schedule: Schedule, call: Call, dtype: DType, folds: tuple[Fold2, Fold2] | None, pipes: Mapping[int, Pipe],
        scratch: bytearray, sides: Sides, results: Sides | None, raw_dtype: DType | None = None, first_round: int = 0,
    ) -> None:  # fmt: skip
        self.dtype, self.call, self._folds = dtype, call, folds
        self.narrow = folds is not None and dtype != DTYPES[call.kind]
        self.carried = carrier(dtype) if self.narrow else None  # what the caller's memory is seen as
        self.headers: list[bytearray] = []
        self.runs = 0
        self.seq = 0
        self._schedule, self._pipes, self._first_round = schedule, pipes, first_round
        self._raw_dtype = raw_dtype
        self._scratch = scratch
        self._homes = scratch_layout(schedule.scratch, dtype.itemsize)[0]
        self._sides, self._sides_nbytes = sides, 0
        self._sides_at: dict[Place, tuple[int, int]] = {}
        self._results, self._results_nbytes = results, 0
        if raw_dtype is not None:
            self._lay_out_sides(raw_dtype.itemsize, lambda recv: self._travels_as(recv) != dtype)
        self._contributions: dict[int, Incoming] = {}
        self._shared: dict[bytes, bytearray] = {}
        self._origins: dict[Range, Incoming] = {}
        self.stages = [self._stage(k, r) for k, r in enumerate(schedule.rounds) if r.sends or r.recvs or r.folds]
        self.direct = Direct.of(self)
        self.changed = False

    def end(self) -> None:
        """Count a run, and follow a peer that has changed its dtype."""
        self.runs += 1
        if self.changed:
            self.changed = False
            self.direct = Direct.of(self)

    def traffic(self) -> dict[int, tuple[int, int, int, int]]:
        """Per peer: messages and payload bytes sent, messages and payload bytes received in one run."""
        total: dict[int, list[int]] = {}
        for stage in self.stages:
            for peer, _, messages in stage.outgoing:
                row = total.setdefault(peer, [0, 0, 0, 0])
                row[0] += len(messages)
                row[1] += sum(m.payload_nbytes for m in messages)
            for i in stage.incoming:
                row = total.setdefault(i.peer, [0, 0, 0, 0])
                row[2] += 1
                row[3] += payload_nbytes(i.header)
        return {peer: (a, b, c, d) for peer, (a, b, c, d) in total.items()}

    def own_header(self, header: bytearray) -> bytearray:
        """A header whose sequence number is kept current. Equal ones are one object."""
        SEQ.pack_into(header, SEQ_OFFSET, 0)
        key = bytes(header)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = header
            self.headers.append(header)
            SEQ.pack_into(header, SEQ_OFFSET, self.seq)
        return shared

    def side(self, place: Place, n_elements: int, itemsize: int) -> tuple[bytearray, int]:
        """Where a payload of another `itemsize` lands, header first: a block and an offset."""
        if self._sides_at.get(place, (0, 0))[1] < HEADER_BYTES + n_elements * itemsize:
            self._lay_out_sides(itemsize, lambda recv: True)
            self._sides.reserve(self._sides_nbytes, 2)
        return self._sides.reserve(self._sides_nbytes), self._sides_at[place][0]

    def _lay_out_sides(self, itemsize: int, wanted: Callable[[Recv], bool]) -> None:
        sizes: dict[Place, int] = {}
        for round_ in self._schedule.rounds:
            for recv, place in zip(round_.recvs, _places(round_), strict=True):
                if wanted(recv):
                    sizes[place] = max(sizes.get(place, 0), HEADER_BYTES + len(recv.into) * itemsize)
        for place, size in sizes.items():
            self._sides_at[place] = self._sides_nbytes, size
            self._sides_nbytes += -(-size // _ALIGN) * _ALIGN

    def results_block(self) -> bytearray:
        """Where results are rounded before they leave."""
        assert self._results is not None
        return self._results.reserve(self._results_nbytes)

    def begin(self, seq: int) -> None:
        """Give all headers the sequence number of this run."""
        self.seq = seq
        for header in self.headers:
            SEQ.pack_into(header, SEQ_OFFSET, seq)

    def _spot(self, r: Range) -> Spot:
        if r.buffer in (DATA, OUT):
            length = self._schedule.data if r.buffer == DATA else self._schedule.out
            return Spot(None, r.buffer == OUT, r.start, r.stop, len(r) == length)
        fixed = np.frombuffer(
            self._scratch, carrier(self.dtype), len(r), self._homes[r.buffer] + HEADER_BYTES + r.start * self.dtype.itemsize
        )
        return Spot(fixed, False, r.start, r.stop, False)

    def _header(self, k: int, part: int, n_elements: int, payload: DType) -> bytearray:
        return self.own_header(self.call.header(k + self._first_round, part, CODES[payload], n_elements * payload.itemsize))

    def _travels_as(self, recv: Recv) -> DType:
        """What `recv` brings, if the others bring what this rank brings."""
        own = self._raw_dtype
        if own is not None and (recv.raw or (recv.result and self._results is not None and own in _NARROW)):
            return own
        return self.dtype

    def _stage(self, k: int, round_: Round) -> Stage:
        stage = Stage()
        by_peer: dict[int, list[Message]] = {}
        results: dict[Range, Result] = {}
        for send in round_.sends:
            messages = by_peer.setdefault(send.peer, [])
            messages.append(self._message(k, len(messages), send))
            if send.result and self._results is not None:
                messages[-1].result = results.get(send.what) or results.setdefault(send.what, self._result(send.what, results))
                messages[-1].asker = self._contributions.get(send.peer)
        stage.outgoing = [(peer, self._pipes[peer], messages) for peer, messages in by_peer.items()]
        parts: dict[int, int] = {}
        where: dict[Range, int] = {}
        last: dict[int, Incoming] = {}
        for recv, place in zip(round_.recvs, _places(round_), strict=True):
            part = parts[recv.peer] = parts.get(recv.peer, -1) + 1
            where[recv.into] = len(stage.incoming)
            incoming = self._incoming(k, part, recv, place)
            if recv.raw:
                self._contributions.setdefault(recv.peer, incoming)
            incoming.before = last.get(recv.peer)
            last[recv.peer] = incoming
            stage.incoming.append(incoming)
        for fold in round_.folds:
            self._steps(stage.steps, fold, where, round_.sends)
        return stage

    def _message(self, k: int, part: int, send: Send) -> Message:
        origin = self._origins.get(send.what)
        is_raw = send.raw and send.what.buffer == DATA and self._raw_dtype is not None
        payload = self._raw_dtype if send.raw and self._raw_dtype is not None else self.dtype
        return Message(self._header(k, part, len(send.what), payload), self._spot(send.what), is_raw, origin)

    def _result(self, what: Range, before: Mapping[Range, Result]) -> Result:
        at = sum(Result.nbytes(len(r)) for r in before)
        self._results_nbytes = max(self._results_nbytes, at + Result.nbytes(len(what)))
        return Result(self, self._spot(what), at)

    def _incoming(self, k: int, part: int, recv: Recv, place: Place) -> Incoming:
        scratch = recv.into.buffer not in (DATA, OUT) and recv.into.start == 0
        home = (self._scratch, self._homes[recv.into.buffer]) if scratch else None
        header = self._header(k, part, len(recv.into), self._travels_as(recv))
        incoming = Incoming(self, recv, self._pipes[recv.peer], header, self._spot(recv.into), home, place)
        self._origins[recv.into] = incoming
        return incoming

    def _steps(self, steps: list[Step], fold: Fold, where: Mapping[Range, int], sends: Sequence[Send]) -> None:
        """Break a fold into steps of two pieces that accumulate in scratch, or in the result's own place."""

        def add(node: Expression, root: bool) -> Range:
            if isinstance(node, Range):
                return node
            left, right = add(node[0], False), add(node[1], False)
            into = fold.into if root else next(r for r in (left, right) if r.buffer not in (DATA, OUT) or r == fold.into)
            steps.append(self._step(self._folds and self._folds[root], left, right, into, where, sends))
            return into

        lone = isinstance(fold.sources, Range)
        if lone and fold.sources != fold.into:
            steps.append(self._step(None, fold.sources, None, fold.into, where, sends))
        elif not lone:
            add(fold.sources, True)

    def _step(
        self, f: Fold2 | None, left: Range, right: Range | None, out: Range, where: Mapping[Range, int], sends: Sequence[Send]
    ) -> Step:
        read = (left,) if right is None else (left, right)
        needs = tuple(where[r] for r in read if r in where)
        after = any(s.what.buffer == out.buffer and max(s.what.start, out.start) < min(s.what.stop, out.stop) for s in sends)
        if self.narrow and f is not None:  # this rank's contribution is where the sum goes
            f = _NarrowSum(self.dtype, self.call.n_elements, self._origins[next(r for r in read if r != out)])
        return Step(f, self._spot(left), None if right is None else self._spot(right), self._spot(out), needs, after)


class _NarrowSum:
    """The fold of a narrow program. What came in another dtype than this rank's is added in float32, as everywhere else."""

    def __init__(self, dtype: DType, n_elements: int, theirs: Incoming) -> None:
        bind = narrow_sum(dtype, n_elements)
        assert bind is not None
        assert theirs.spot.fixed is not None
        self._add, self._dtype, self._theirs = bind(theirs.spot.fixed), dtype, theirs

    def __call__(self, left: Array, right: Array, out: Array) -> None:
        if self._theirs.side is None:
            self._add(out)
            return
        total, other = np.empty(out.size, FLOAT32), np.empty(out.size, FLOAT32)
        cast(total, out.view(self._dtype))
        cast(other, self._theirs.side_array())
        fold_functions("sum", FLOAT32)[1](total, other, total)
        cast(out.view(self._dtype), total)


def _places(round_: Round) -> Iterator[Place]:
    """For each message of a round, what its side place is shared with: the same scratch, or results of other rounds.

    What lands in the same place of scratch can share: as long as the one is in use, so is the other. Results are brought into
    place as soon as they are there.
    """
    n_results = 0
    for recv in round_.recvs:
        yield ("a result", n_results) if recv.result else (recv.into.buffer, recv.into.start)
        n_results += recv.result


def payload_nbytes(header: bytearray) -> int:
    """What a header says of its payload."""
    return int.from_bytes(header[HEADER_BYTES - 8 : HEADER_BYTES], "little")


def scratch_layout(lengths: Mapping[str, int], itemsize: int) -> tuple[dict[str, int], int]:
    """Where each scratch buffer begins, with room for a header before its first element, and the total in bytes."""
    homes, at = {}, 0
    for name, length in lengths.items():
        homes[name] = at
        at += HEADER_BYTES + -(-length * itemsize // _ALIGN) * _ALIGN
    return homes, at
