"""A schedule bound to links and scratch: everything about a call that does not change from one call to the next.

A decode loop repeats the same few shapes, so headers, scratch views and fold steps are made once, here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostring.arrays.dtypes import (
    BLOCK,
    DTYPES,
    IN_BLOCKS,
    PAYLOAD_CODES,
    Array,
    DType,
    carrier,
    element_nbytes,
    nbytes_of,
)
from hostring.arrays.fold import Expression, Fold2
from hostring.engine.binding import ALIGN, Binding, Buffers, SideKey, SideMemory, Spot, side_keys
from hostring.engine.frames import HEADER_BYTES, Call
from hostring.engine.receiving import Incoming, Pipe
from hostring.engine.sending import NARROW, Outgoing, Result
from hostring.engine.sixteen_bit_sum import SixteenBitSum
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

    def run(self, b: Buffers) -> None:
        if self.fold is None or self.right is None:
            self.out.array(b)[...] = self.left.array(b)
        else:
            self.fold(self.left.array(b), self.right.array(b), self.out.array(b))


@dataclass
class Stage:
    """One round, bound."""

    outgoing: list[tuple[int, Pipe, list[Outgoing]]] = field(default_factory=list)
    incoming: list[Incoming] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Direct:
    """The short form of a program of one round that sends the whole of `DATA`, receives into scratch, and folds.

    That is every small all-reduce on a mesh. `Engine.run_direct` runs it with the fewest operations.

    Attributes:
        sends: (send, header, bytes to send, peer, pipe).
        recvs: see `Landing.read`, in the order of ranks.
        casts: what brings payloads of another dtype into place.
        steps: (fold, left, right, out) in order, where None is the caller's array.
        moved: payload bytes sent and received.
    """

    __slots__ = ("binding", "casts", "headers", "moved", "program", "recvs", "sends", "stage", "steps")

    def __init__(self, program: Program, stage: Stage, landings: Sequence[Any]) -> None:
        self.program, self.binding, self.stage = program, program.binding, stage
        self.headers = self.binding.headers
        payloads = [(m.payload_nbytes, peer, pipe, m.header) for peer, pipe, (m,) in stage.outgoing]
        self.sends = [(pipe.link.send, header, HEADER_BYTES + n, peer, pipe) for n, peer, pipe, header in payloads]
        self.recvs = [landing.read for landing in landings]
        self.casts = [landing.convert for landing in landings if landing.convert is not None]
        self.steps: list[tuple[Any, Array | None, Array | None, Array | None]] = [
            (s.fold, s.left.fixed, None if s.right is None else s.right.fixed, s.out.fixed) for s in stage.steps
        ]
        self.moved = sum(n for n, *_ in payloads), sum(size - HEADER_BYTES for _, _, size, *_ in self.recvs)

    @staticmethod
    def of(program: Program) -> Direct | None:
        """The short form, or None where `program` has none."""
        if len(program.stages) != 1:
            return None
        stage = program.stages[0]
        for _, _, messages in stage.outgoing:
            if len(messages) > 1 or not messages[0].in_one_piece:
                return None
        for s in stage.steps:
            spots = [x for x in (s.left, s.right, s.out) if x is not None and x.fixed is None]
            if s.fold is None or any(x.is_out or not x.whole for x in spots):
                return None
        landings = [i.landing() for i in stage.incoming]
        return None if None in landings else Direct(program, stage, landings)


class Program:
    """See the module.

    Attributes:
        binding: what its messages share.
        subject: what the flight recorder keeps: the call, and the name of the dtype that is folded or moved.
        carried: the dtype as which a 16-bit program sees the caller's memory, see `carrier`; None for other programs. A
            16-bit program folds 16-bit contributions as they are. It gives the bits of folding in float32 and rounding,
            and saves three casts, but only a sum of two can do so.
        direct: its short form, if it has one.
    """

    def __init__(
        self, schedule: Schedule, call: Call, dtype: DType, folds: tuple[Fold2, Fold2] | None, pipes: Mapping[int,
        Pipe], scratch: bytearray, sides: SideMemory, results: SideMemory | None, raw_dtype: DType | None = None,
        first_round: int = 0,
    ) -> None:  # fmt: skip
        sixteen_bit = folds is not None and dtype != DTYPES[call.kind]
        self.binding = Binding(schedule, call, dtype, sixteen_bit, sides, results)
        self.dtype, self.call, self._folds = dtype, call, folds
        self._carrier = carrier(dtype)
        self.carried = self._carrier if sixteen_bit else None
        self.subject = call, dtype.name
        self._schedule, self._pipes, self._first_round = schedule, pipes, first_round
        self._raw_dtype = raw_dtype
        self._scratch = scratch
        self._homes = scratch_layout(schedule.scratch, dtype.itemsize)[0]
        if raw_dtype is not None:
            self.binding.lay_out_sides(raw_dtype, lambda recv: self._travels_as(recv) != dtype)
        self._wide: dict[int, tuple[Array, Array]] = {}
        self._contributions: dict[int, Incoming] = {}
        self._origins: dict[Range, Incoming] = {}
        self.stages = [self._stage(k, r) for k, r in enumerate(schedule.rounds) if r.sends or r.recvs or r.folds]
        self.direct = Direct.of(self)

    def adapt(self) -> tuple[int, int]:
        """Follow a peer that has changed its dtype in the last run. Returns that run's payload bytes sent and
        received."""
        self.binding.changed = False
        self.direct = Direct.of(self)
        rows = self.binding.traffic().values()
        return sum(row[1] for row in rows), sum(row[3] for row in rows)

    def _spot(self, r: Range) -> Spot:
        if r.buffer in (DATA, OUT):
            length = self._schedule.data if r.buffer == DATA else self._schedule.out
            return Spot(None, r.buffer == OUT, r.start, r.stop, r.stop - r.start == length)
        at = self._homes[r.buffer] + HEADER_BYTES + r.start * self.dtype.itemsize
        fixed = np.frombuffer(self._scratch, self._carrier, r.stop - r.start, at)
        return Spot(fixed, False, r.start, r.stop, False)

    def _header(self, k: int, part: int, r: Range, payload: DType) -> bytearray:
        nbytes = nbytes_of(r.stop - r.start, payload)
        return self.binding.own_header(self.call.header(k + self._first_round, part, PAYLOAD_CODES[payload], nbytes))

    def _travels_as(self, recv: Recv) -> DType:
        """The dtype of the payload of `recv`, if the others bring what this rank brings."""
        own = self._raw_dtype
        if own is not None and (recv.raw or (recv.result and self.binding.results is not None and own in NARROW)):
            return own
        return self.dtype

    def _stage(self, k: int, round_: Round) -> Stage:
        stage = Stage()
        self._add_sends(stage, k, round_.sends)
        parts: dict[int, int] = {}
        where: dict[Range, int] = {}
        last: dict[int, Incoming] = {}
        for recv, key in zip(round_.recvs, side_keys(round_), strict=True):
            part = parts[recv.peer] = parts.get(recv.peer, -1) + 1
            where[recv.into] = len(stage.incoming)
            incoming = self._incoming(k, part, recv, key)
            if recv.raw:
                self._contributions.setdefault(recv.peer, incoming)
            incoming.before = last.get(recv.peer)
            last[recv.peer] = incoming
            stage.incoming.append(incoming)
        for fold in round_.folds:
            self._add_steps(stage.steps, fold, where, round_.sends)
        return stage

    def _add_sends(self, stage: Stage, k: int, sends: Sequence[Send]) -> None:
        by_peer: dict[int, list[Outgoing]] = {}
        results: dict[Range, Result] = {}
        for send in sends:
            messages = by_peer.setdefault(send.peer, [])
            message = self._outgoing(k, len(messages), send)
            messages.append(message)
            if send.result and self.binding.results is not None:
                if send.what not in results:
                    at = sum(Result.nbytes(len(r)) for r in results)
                    results[send.what] = Result(self.binding, self._spot(send.what), at)
                message.result, message.asker = results[send.what], self._contributions.get(send.peer)
            self.binding.sent.append((send.peer, message))
        stage.outgoing = [(peer, self._pipes[peer], messages) for peer, messages in by_peer.items()]

    def _outgoing(self, k: int, part: int, send: Send) -> Outgoing:
        what, raw = send.what, self._raw_dtype if send.raw and send.what.buffer == DATA else None
        payload = self.dtype if raw is None else raw
        header, spot = self._header(k, part, what, payload), self._spot(what)
        message = Outgoing(self.binding, header, spot, raw is not None, self._origins.get(what))
        if payload in IN_BLOCKS:
            whole = element_nbytes(self._schedule.data, payload)
            message.elements = slice(*(element_nbytes(at, payload) for at in (what.start, what.stop)))
            message.scales = slice(*(whole - (-at // BLOCK) for at in (what.start, what.stop)))
        return message

    def _incoming(self, k: int, part: int, recv: Recv, key: SideKey) -> Incoming:
        into = recv.into
        scratch = into.buffer not in (DATA, OUT) and into.start == 0
        home = (self._scratch, self._homes[into.buffer]) if scratch else None
        header = self._header(k, part, into, self._travels_as(recv))
        incoming = Incoming(self.binding, recv, self._pipes[recv.peer], header, self._spot(into), home, key)
        self._origins[into] = incoming
        self.binding.received.append((recv.peer, incoming))
        return incoming

    def _add_steps(self, steps: list[Step], fold: Fold, where: Mapping[Range, int], sends: Sequence[Send]) -> None:
        """Break a fold into steps of two pieces that accumulate in scratch, or in the result's own place."""

        def add(node: Expression, root: bool) -> Range:
            if isinstance(node, Range):
                return node
            left, right = add(node[0], False), add(node[1], False)
            free = (r for r in (left, right) if r.buffer not in (DATA, OUT) or r == fold.into)
            into = fold.into if root else next(free)
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
        if self.binding.sixteen_bit and f is not None:  # this rank's contribution is where the sum goes
            theirs = self._origins[next(r for r in read if r != out)]
            f = SixteenBitSum(self.dtype, self.call.n_elements, theirs, self._wide)
        return Step(f, self._spot(left), None if right is None else self._spot(right), self._spot(out), needs, after)


def scratch_layout(lengths: Mapping[str, int], itemsize: int) -> tuple[dict[str, int], int]:
    """Where each scratch buffer begins, with room for a header before its first element, and the total in bytes."""
    homes, at = {}, 0
    for name, length in lengths.items():
        homes[name] = at
        at += HEADER_BYTES + -(-length * itemsize // ALIGN) * ALIGN
    return homes, at
