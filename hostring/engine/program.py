"""A schedule bound to links and scratch: everything about a call that does not change from one call to the next.

A decode loop repeats the same few shapes for ever, so headers, scratch views and fold steps are made once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostring.arrays.casting import bound_cast, cast
from hostring.arrays.dtypes import (
    BFLOAT16,
    BLOCK,
    DTYPES,
    FLOAT32,
    MXINT8,
    PAYLOAD_CODES,
    Array,
    DType,
    carrier,
    nbytes_of,
)
from hostring.arrays.fold import Expression, Fold2, fold_functions, narrow_sum
from hostring.engine.frames import HEADER_BYTES, SEQ, SEQ_OFFSET, Call, payload_nbytes
from hostring.engine.receiving import Incoming, Pipe, SidePlace, Sides
from hostring.engine.sending import ALIGN, NARROW, Message, Result, Spot
from hostring.topologies.schedule import DATA, OUT, Fold, Range, Recv, Round, Schedule, Send


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
            (pipe.link.send, m.header, HEADER_BYTES + m.payload_nbytes, peer, pipe)
            for peer, pipe, (m,) in stage.outgoing
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
                s.fold is not None
                and all(
                    x is None or x.fixed is not None or (x.whole and not x.is_out) for x in (s.left, s.right, s.out)
                )
                for s in stage.steps
            )
        )
        return Direct(program, stage) if simple and stage.steps else None


class Program:
    """See the module. `runs` counts completed runs; what each run moves is in `traffic`, by peer.

    Attributes:
        subject: what the flight recorder keeps: the call, and the name of the dtype that is folded or moved.
        carried: see `carrier`; None unless the program is narrow.
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
        self._wide: dict[int, tuple[Array, Array]] = {}
        self._banked: dict[int, tuple[int, ...]] = {}
        self.subject = call, dtype.name
        self.seq = 0
        self._schedule, self._pipes, self._first_round = schedule, pipes, first_round
        self._raw_dtype = raw_dtype
        self._scratch = scratch
        self._homes = scratch_layout(schedule.scratch, dtype.itemsize)[0]
        self._sides, self._sides_nbytes = sides, 0
        self._sides_at: dict[SidePlace, tuple[int, int]] = {}
        self._results, self._results_nbytes = results, 0
        if raw_dtype is not None:
            self._lay_out_sides(raw_dtype, lambda recv: self._travels_as(recv) != dtype)
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

    def bank(self) -> None:
        """Put aside what was moved so far, before a peer's dtype changes what a run moves."""
        runs, self.runs = self.runs, 0
        if runs:
            for peer, row in self.traffic().items():
                before = self._banked.get(peer, (0, 0, 0, 0))
                self._banked[peer] = tuple(b + runs * r for b, r in zip(before, row, strict=True))

    def moved(self) -> dict[int, tuple[int, ...]]:
        """What was moved since this was last asked, in the form of `traffic`."""
        self.bank()
        moved, self._banked = self._banked, {}
        return moved

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

    def side(self, place: SidePlace, n_elements: int, payload: DType) -> tuple[bytearray, int]:
        """Where a `payload` of another dtype lands, header first: memory and an offset."""
        if self._sides_at.get(place, (0, 0))[1] < HEADER_BYTES + nbytes_of(n_elements, payload):
            self._lay_out_sides(payload, lambda recv: True)
            self._sides.reserve(self._sides_nbytes, 2)
        return self._sides.reserve(self._sides_nbytes), self._sides_at[place][0]

    def _lay_out_sides(self, payload: DType, wanted: Callable[[Recv], bool]) -> None:
        sizes: dict[SidePlace, int] = {}
        for round_ in self._schedule.rounds:
            for recv, place in zip(round_.recvs, _places(round_), strict=True):
                if wanted(recv):
                    sizes[place] = max(sizes.get(place, 0), HEADER_BYTES + nbytes_of(len(recv.into), payload))
        for place, size in sizes.items():
            self._sides_at[place] = self._sides_nbytes, size
            self._sides_nbytes += -(-size // ALIGN) * ALIGN

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
            self._scratch,
            carrier(self.dtype),
            len(r),
            self._homes[r.buffer] + HEADER_BYTES + r.start * self.dtype.itemsize,
        )
        return Spot(fixed, False, r.start, r.stop, False)

    def _header(self, k: int, part: int, n_elements: int, payload: DType) -> bytearray:
        return self.own_header(
            self.call.header(k + self._first_round, part, PAYLOAD_CODES[payload], nbytes_of(n_elements, payload))
        )

    def _travels_as(self, recv: Recv) -> DType:
        """What `recv` brings, if the others bring what this rank brings."""
        own = self._raw_dtype
        if own is not None and (recv.raw or (recv.result and self._results is not None and own in NARROW)):
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
                messages[-1].result = results.get(send.what) or results.setdefault(
                    send.what, self._result(send.what, results)
                )
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
        raw = self._raw_dtype if send.raw and send.what.buffer == DATA else None
        payload = self.dtype if raw is None else raw
        message = Message(
            self._header(k, part, len(send.what), payload), self._spot(send.what), raw is not None, origin
        )
        if payload == MXINT8:
            message.scales = slice(*(self._schedule.data - (-at // BLOCK) for at in (send.what.start, send.what.stop)))
        return message

    def _result(self, what: Range, before: Mapping[Range, Result]) -> Result:
        at = sum(Result.nbytes(len(r)) for r in before)
        self._results_nbytes = max(self._results_nbytes, at + Result.nbytes(len(what)))
        return Result(self, self._spot(what), at)

    def _incoming(self, k: int, part: int, recv: Recv, place: SidePlace) -> Incoming:
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
            into = (
                fold.into if root else next(r for r in (left, right) if r.buffer not in (DATA, OUT) or r == fold.into)
            )
            steps.append(self._step(self._folds and self._folds[root], left, right, into, where, sends))
            return into

        lone = isinstance(fold.sources, Range)
        if lone and fold.sources != fold.into:
            steps.append(self._step(None, fold.sources, None, fold.into, where, sends))
        elif not lone:
            add(fold.sources, True)

    def _step(
        self,
        f: Fold2 | None,
        left: Range,
        right: Range | None,
        out: Range,
        where: Mapping[Range, int],
        sends: Sequence[Send],
    ) -> Step:
        read = (left,) if right is None else (left, right)
        needs = tuple(where[r] for r in read if r in where)
        after = any(
            s.what.buffer == out.buffer and max(s.what.start, out.start) < min(s.what.stop, out.stop) for s in sends
        )
        if self.narrow and f is not None:  # this rank's contribution is where the sum goes
            f = _NarrowSum(
                self.dtype, self.call.n_elements, self._origins[next(r for r in read if r != out)], self._wide
            )
        return Step(f, self._spot(left), None if right is None else self._spot(right), self._spot(out), needs, after)


class _NarrowSum:
    """The fold of a narrow program. What came in another dtype than this rank's is added in float32, as everywhere else.

    Args:
        dtype: of this rank's contribution. n_elements: of the whole buffer.
        theirs: the other contribution.
        wide: float32 arrays by size, two of each, which all folds of the program share.
    """

    def __init__(self, dtype: DType, n_elements: int, theirs: Incoming, wide: dict[int, tuple[Array, Array]]) -> None:
        bind = narrow_sum(dtype, n_elements)
        assert bind is not None
        assert theirs.spot.fixed is not None
        self._add, self._dtype, self._theirs, self._wide = bind(theirs.spot.fixed), dtype, theirs, wide
        self._fold = fold_functions("sum", FLOAT32)[1]
        self._bound: memoryview | None = None  # the payload that `_widen` is bound to
        self._widen: Callable[[], Any] = _nothing

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


def _nothing() -> None:
    pass


def _places(round_: Round) -> Iterator[SidePlace]:
    """For each message of a round, what its side place is shared with: the same scratch, or results of other rounds.

    What lands in the same place of scratch can share: as long as the one is in use, so is the other. Results are brought into
    place as soon as they are there.
    """
    n_results = 0
    for recv in round_.recvs:
        yield ("a result", n_results) if recv.result else (recv.into.buffer, recv.into.start)
        n_results += recv.result


def scratch_layout(lengths: Mapping[str, int], itemsize: int) -> tuple[dict[str, int], int]:
    """Where each scratch buffer begins, with room for a header before its first element, and the total in bytes."""
    homes, at = {}, 0
    for name, length in lengths.items():
        homes[name] = at
        at += HEADER_BYTES + -(-length * itemsize // ALIGN) * ALIGN
    return homes, at
