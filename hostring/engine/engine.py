"""Runs programs on links, in the calling thread: full duplex, spinning briefly, then polling, under one deadline."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from hostring.arrays.dtypes import Array
from hostring.engine.control import Control, Waiting
from hostring.engine.counters import FOLD, TRANSFER, WAIT, Counters
from hostring.engine.frames import SEQ, SEQ_OFFSET, numbered
from hostring.engine.program import Direct, Program, Stage, Step
from hostring.engine.receiving import Incoming, Pipe
from hostring.engine.recorder import Recorder
from hostring.engine.sending import Buffers

_set_seq = SEQ.pack_into

_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: None)
_YIELD_MASK = (
    15  # give way to another process on this core at every 16th idle turn, where ranks have cores of their own
)
_DEADLINE_MASK = (
    127  # look at the clock at every 128th turn that moved something: a trickle must not outlast the deadline
)


class _Unsent:
    """What the pipe to one peer has not taken yet."""

    __slots__ = ("buffers", "peer", "pipe")

    def __init__(self, peer: int, pipe: Pipe, buffers: list[Any], taken: int) -> None:
        self.peer, self.pipe = peer, pipe
        self.buffers = [_bytes_of(x) for x in buffers]
        self._drop(taken)

    def _drop(self, taken: int) -> None:
        while self.buffers and taken >= len(self.buffers[0]):
            taken -= len(self.buffers.pop(0))
        if taken:
            self.buffers[0] = self.buffers[0][taken:]

    def step(self) -> bool:
        taken = self.pipe.send(self.buffers)
        self._drop(taken)
        return taken > 0


def _bytes_of(x: Any) -> memoryview:
    return memoryview(x if isinstance(x, (bytes, bytearray, memoryview)) else x.view("u1")).cast("B")


class Engine:
    """Executes one program at a time.

    Args:
        control: hears aborts and deaths while this rank sleeps, and finds the culprit when a deadline passes.
        counters: where seconds are added.
        recorder: where every operation leaves a line.
        spins: how often to retry before sleeping in the kernel.
        shared: ranks share cores: give way at every turn, to whoever is waited for.
    """

    def __init__(
        self, control: Control, counters: Counters, recorder: Recorder, spins: int, shared: bool = False
    ) -> None:
        self._control, self._seconds = control, counters.phases
        self._record = recorder.record
        self._late = -1  # whom the present operation waited for last
        self.spins = spins
        self._yield_mask = 0 if shared else _YIELD_MASK

    def run_direct(
        self, direct: Direct, data: Array, raw: Array | None, seq: int, timeout: float, started: float
    ) -> None:
        """`run` for a program in its short form: one exchange with every peer, one fold, `data` in place.

        Args:
            raw: what is sent instead of `data`: the same numbers in their own 16 bits.

        Whatever is not the common case, such as a full pipe, a peer that is late, or an unexpected header, goes on in
        `_exchange` from where it is.
        """
        for header in direct.headers:
            _set_seq(header, SEQ_OFFSET, seq)
        unsent: list[_Unsent] = []
        payload = data if raw is None else raw
        for send, header, total, peer, pipe in direct.sends:
            taken = send((header, payload))
            if taken != total:
                unsent.append(_Unsent(peer, pipe, [header, payload], taken))
        late = -1
        sent = came = perf_counter()
        for i, view, size, frame, at in direct.recvs:
            pipe = i.pipe
            n = pipe.recv(view)
            if not n:
                n = self._spin(pipe, view)
                came = perf_counter()
                pipe.waited += came - sent
                late = i.peer
            if n != size or unsent or not frame.startswith(i.header, at):
                came += self._rest(direct, i, n, Buffers(data, data), unsent, seq, started, timeout)
                break
        arrived = perf_counter()
        for cast in direct.casts:
            cast()
        for fold, left, right, out in direct.steps:
            fold(data if left is None else left, data if right is None else right, data if out is None else out)
        seconds = self._seconds
        now = perf_counter()
        seconds[WAIT] += came - sent
        seconds[TRANSFER] += (sent - started) + (arrived - came)
        seconds[FOLD] += now - arrived
        program = direct.program
        self._record((program.subject, seq, started, now, came - sent, now - arrived, late))
        if program.changed:
            program.end()
        else:
            program.runs += 1

    def _spin(self, pipe: Pipe, view: memoryview) -> int:
        """Read until something comes, or for as long as spinning is worth while. Returns the number of bytes."""
        recv, mask = pipe.recv, self._yield_mask
        for idle in range(self.spins):
            if n := recv(view):
                return n
            if not idle & mask:
                _yield()
        return 0

    def _rest(
        self, direct: Direct, at: Incoming, n: int, b: Buffers, unsent: list[_Unsent], seq: int, started: float, timeout: float
    ) -> float:  # fmt: skip
        """Finish an exchange of which message `at` has just got `n` bytes, and those before it are there. Returns seconds of waiting."""
        program, incoming = direct.program, direct.stage.incoming
        program.seq = seq
        pending = incoming[incoming.index(at) :]
        for i in pending:
            i.start(b)
        if n:
            at.took(n)
        waited, _ = self._exchange(
            program, direct.stage, b, [i for i in pending if not i.done], unsent, started, timeout, fold_early=False
        )
        if program.changed:  # a cast that is bound to yesterday's dtype must not run
            direct.casts.clear()
            for i in incoming:
                if i.side is not None:
                    i.convert(b)
        return waited

    def run(self, program: Program, b: Buffers, seq: int, timeout: float, started: float) -> None:
        """Do what `program` says with the caller's buffers.

        Args:
            seq: the number of this call in its group.
            timeout: seconds from `started`, a `perf_counter` time, until the whole of it must be done.

        Raises:
            HostringError: see the module of that name. The buffers' contents are unspecified then.
        """
        program.begin(seq)
        self._late = -1
        folding = waiting = 0.0
        for stage in program.stages:
            unsent: list[_Unsent] = []
            for peer, pipe, messages in stage.outgoing:
                buffers = [x for m in messages for x in m.buffers(b)]
                taken = pipe.send(buffers)
                if taken != sum([len(x) * x.itemsize if isinstance(x, np.ndarray) else len(x) for x in buffers]):
                    unsent.append(_Unsent(peer, pipe, buffers, taken))
            at = 0
            if stage.incoming or unsent:
                for i in stage.incoming:
                    i.start(b)
                waited, at = self._exchange(program, stage, b, stage.incoming, unsent, started, timeout)
                waiting += waited
            if at < len(stage.steps):
                before = perf_counter()
                for step in stage.steps[at:] if at else stage.steps:
                    fold(step, b)
                folding += perf_counter() - before
        seconds = self._seconds
        seconds[FOLD] += folding
        seconds[WAIT] += waiting
        now = perf_counter()
        seconds[TRANSFER] += now - started - folding - waiting
        self._record((program.subject, seq, started, now, waiting, folding, self._late))
        program.end()

    def _exchange(
        self, program: Program, stage: Stage, b: Buffers, pending: list[Incoming], unsent: list[_Unsent], started: float, timeout: float,
        fold_early: bool = True,
    ) -> tuple[float, int]:  # fmt: skip
        """Receive what is pending and send the rest, folding what is complete meanwhile. Returns seconds of waiting, and steps done."""
        waited, since, idle, at, turns = 0.0, 0.0, 0, 0, 0
        late: Pipe | None = None
        poller: select.poll | None = None
        while pending or unsent:
            progress = done = False
            for i in pending:
                if (i.before is None or i.before.done) and i.step():
                    progress = True
                    if i.done:
                        done = True
                        if i.side is not None and fold_early:
                            i.convert(b)
            if done:
                pending = [i for i in pending if not i.done]
            if unsent:
                for u in unsent:
                    progress |= u.step()
                unsent = [u for u in unsent if u.buffers]
            if progress:
                if late is not None:
                    now = perf_counter()
                    waited += now - since
                    late.waited += now - since
                    late = None
                idle, poller = 0, None
                if done and pending and fold_early:
                    at = self._fold_ready(stage, b, at, bool(unsent))
                turns += 1
                if not turns & _DEADLINE_MASK and perf_counter() > started + timeout and (pending or unsent):
                    raise self._control.timed_out(_waiting(program, pending, unsent), _progress(pending), timeout)
                continue
            if late is None:
                since = perf_counter()
                late = pending[0].pipe if pending else unsent[0].pipe
                self._late = pending[0].peer if pending else unsent[0].peer
            idle += 1
            if idle <= self.spins:
                if not idle & self._yield_mask:
                    _yield()
            elif poller is None:  # what came in before the doorbells were set would be slept through: look once more
                poller = self._arm(pending, unsent)
            else:
                self._sleep(poller, program, pending, unsent, started, timeout)
                poller = None
        return waited, at

    def _fold_ready(self, stage: Stage, b: Buffers, at: int, sending: bool) -> int:
        """Fold, in the declared order, as far as the contributions have come. Returns the index of the next step."""
        incoming = stage.incoming
        for step in stage.steps[at:]:
            if (sending and step.after_sends) or not all(incoming[n].done for n in step.needs):
                break
            fold(step, b)
            at += 1
        return at

    def _arm(self, pending: list[Incoming], unsent: list[_Unsent]) -> select.poll:
        """A poller on the links that this round still needs, and on the control links."""
        poller = select.poll()
        receiving = {i.peer: i.pipe for i in pending}
        sending = {u.peer: u.pipe for u in unsent}
        for peer, pipe in (receiving | sending).items():
            poller.register(pipe.link.fileno(), pipe.link.arm(peer in receiving, peer in sending))
        self._control.register(poller)
        return poller

    def _sleep(
        self, poller: select.poll, program: Program, pending: list[Incoming], unsent: list[_Unsent], started: float, timeout: float
    ) -> None:  # fmt: skip
        """Wait in the kernel until a link of this round, or a control link, has something."""
        control = self._control
        control.waiting = mine = _waiting(program, pending, unsent)
        try:
            remaining = started + timeout - perf_counter()
            if remaining <= 0:
                raise control.timed_out(mine, _progress(pending), timeout)
            events = poller.poll(min(remaining, control.patience()) * 1000)
            control.hear(events)
            if not events:
                control.ask(mine.peer)
        finally:
            control.waiting = None


def _waiting(program: Program, pending: list[Incoming], unsent: list[_Unsent]) -> Waiting:
    late = pending[0].peer if pending else unsent[0].peer
    return Waiting(late, f"{program.call.collective} {numbered(program.seq)}", program.call, program.seq)


def _progress(pending: list[Incoming]) -> str:
    return pending[0].progress() if pending else "took no more bytes"


def fold(step: Step, b: Buffers) -> None:
    """Do one step: fold two pieces, or copy one."""
    if step.fold is None or step.right is None:
        step.out.array(b)[...] = step.left.array(b)
    else:
        step.fold(step.left.array(b), step.right.array(b), step.out.array(b))
