"""What is left of a round when its messages are not there at once: receive, send, fold meanwhile, yield, sleep."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from hostring.engine.binding import Buffers
from hostring.engine.control import Control
from hostring.engine.program import Program, Stage
from hostring.engine.receiving import Incoming, Pipe
from hostring.engine.unsent import Unsent
from hostring.engine.waits import Waiting

yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: None)

_CLOCK_MASK: Final = 127  # look at the clock every 128th turn that moved bytes: a trickle must not outlast the deadline


@dataclass(slots=True)
class Patience:
    """How a rank waits for bytes.

    Attributes:
        spins: how often it looks again before it sleeps in the kernel.
        yield_mask: it yields its core when the number of the idle turn has none of these bits.
    """

    spins: int
    yield_mask: int


@dataclass(slots=True)
class Exchange:
    """The rest of one round: `pending` messages to receive, `unsent` bytes to send.

    Attributes:
        fold_early: fold and convert what is complete while the rest is on its way.
        waited: seconds in which nothing came. folded: seconds of converting and folding what had come.
        late: whom it waits for, or waited for last; -1 when it did not. longest: of those, its longest wait in seconds.
        latest: whom it waited for so long.
        steps_done: how many of the stage's steps were folded.
    """

    control: Control
    patience: Patience
    program: Program
    stage: Stage
    b: Buffers
    pending: list[Incoming]
    unsent: list[tuple[Pipe, Unsent]]
    started: float
    timeout: float
    fold_early: bool = True
    waited: float = 0.0
    folded: float = 0.0
    late: int = -1
    longest: float = 0.0
    latest: int = -1
    steps_done: int = 0
    _idle_since: float = 0.0
    _waits_on: Pipe | None = field(default=None, repr=False)

    def run(self) -> None:
        """Receive and send everything, under the deadline."""
        for i in self.pending:
            i.done = False
        idle = turns = 0
        poller: select.poll | None = None
        while self.pending or self.unsent:
            if self._receive() | self._send():
                idle, poller = 0, None
                if self._waits_on is not None:
                    self._note_arrival(self._waits_on)
                turns += 1
                if not turns & _CLOCK_MASK and (self.pending or self.unsent):
                    self._seconds_left()
                continue
            if self._waits_on is None:
                self._idle_since = perf_counter()
                self._waits_on = self.pending[0].pipe if self.pending else self.unsent[0][0]
                self.late = self._waits_on.link.peer
            idle += 1
            if idle <= self.patience.spins:
                if not idle & self.patience.yield_mask:
                    yield_core()
            elif poller is None:  # look once more: bytes that came before the doorbells were set would not ring them
                poller = self._arm()
            else:
                self.control.sleep(poller, self._waiting(), self._seconds_left())
                poller = None

    def _receive(self) -> bool:
        """Read what is there. Returns whether anything came."""
        progress = done = False
        for i in self.pending:
            if (i.before is None or i.before.done) and i.step(self.b):
                progress = True
                if i.done:
                    done = True
                    if i.side is not None and self.fold_early:
                        begun = perf_counter()
                        i.convert(self.b)
                        self.folded += perf_counter() - begun
        if done:
            self.pending = [i for i in self.pending if not i.done]
            if self.pending and self.fold_early:
                begun = perf_counter()
                self._fold_ready()
                self.folded += perf_counter() - begun
        return progress

    def _send(self) -> bool:
        """Send what the links take. Returns whether they took anything."""
        progress = False
        for pipe, left in self.unsent:
            taken = pipe.send(left.buffers)
            if taken:
                left.drop(taken)
                progress = True
        if progress:
            self.unsent = [u for u in self.unsent if u[1].buffers]
        return progress

    def _fold_ready(self) -> None:
        """Fold, in the declared order, as far as the contributions have come."""
        incoming = self.stage.incoming
        for step in self.stage.steps[self.steps_done :]:
            if (self.unsent and step.after_sends) or not all(incoming[n].done for n in step.needs):
                break
            step.run(self.b)
            self.steps_done += 1

    def _note_arrival(self, pipe: Pipe) -> None:
        """Bytes moved after a time without any, for which the rank at the other end of `pipe` was waited for."""
        seconds = perf_counter() - self._idle_since
        self.waited += seconds
        pipe.waited += seconds
        if seconds > self.longest:
            self.longest, self.latest = seconds, pipe.link.peer
        self._waits_on = None

    def _arm(self) -> select.poll:
        """A poller on the links that this round still needs, and on the control links."""
        poller = select.poll()
        receiving = {i.pipe for i in self.pending}
        sending = {pipe for pipe, _ in self.unsent}
        for pipe in receiving | sending:
            poller.register(pipe.link.fileno(), pipe.link.arm(pipe in receiving, pipe in sending))
        self.control.arm(poller)
        return poller

    def _waiting(self) -> Waiting:
        """What this rank waits for now."""
        program = self.program
        return Waiting(self.late, program.call.collective, program.call, program.binding.seq)

    def _seconds_left(self) -> float:
        """Seconds until the deadline.

        Raises:
            HostringError: it has passed.
        """
        left = self.started + self.timeout - perf_counter()
        if left <= 0:
            progress = self.pending[0].progress() if self.pending else "took no more bytes"
            raise self.control.timed_out(self._waiting(), progress, self.timeout)
        return left
