"""Runs programs on links, in the calling thread: sends and receives at the same time, under one deadline."""

from __future__ import annotations

from time import perf_counter
from typing import Final

import numpy as np

from hostring.arrays.dtypes import Array
from hostring.engine.binding import Buffers, flat
from hostring.engine.control import Control
from hostring.engine.counters import FOLD, TRANSFER, WAIT, Counters
from hostring.engine.exchange import Exchange, Patience, yield_core
from hostring.engine.frames import HEADER_BYTES, SEQ, SEQ_OFFSET
from hostring.engine.program import Direct, Program, Stage
from hostring.engine.receiving import Incoming, Pipe
from hostring.engine.recorder import Recorder
from hostring.engine.unsent import Unsent

_set_seq = SEQ.pack_into
_ndarray = np.ndarray

_YIELD_MASK: Final = 15  # yield the core at every 16th idle turn, where ranks have cores of their own


class Engine:
    """Executes one program at a time.

    Args:
        control: hears aborts and deaths while this rank sleeps, and finds the culprit when a deadline passes.
        counters: where seconds are added.
        recorder: where every operation leaves a line.
        spins: how often to retry before sleeping in the kernel.
        shared: ranks share cores: yield at every turn, to whoever is waited for.
    """

    def __init__(
        self, control: Control, counters: Counters, recorder: Recorder, spins: int, shared: bool = False
    ) -> None:
        self._control, self._seconds = control, counters.phases
        self._record = recorder.record
        self.patience = Patience(spins, 0 if shared else _YIELD_MASK)

    def run_direct(
        self, direct: Direct, data: Array, raw: Array | None, seq: int, timeout: float, started: float
    ) -> None:
        """`run` for a program in its short form: one exchange with every peer, one fold, `data` in place.

        Longer than other functions, because each call of a function would take a few percent of a small all-reduce.
        Whatever is not the common case (a full pipe, a late peer, an unexpected header) goes on in an `Exchange` from
        where it is.

        Args:
            raw: what is sent instead of `data`: the same numbers in their own 16 bits.
        """
        if type(data) is not _ndarray or data.ndim != 1 or not data.flags.c_contiguous:
            data = flat(data)
        for header in direct.headers:
            _set_seq(header, SEQ_OFFSET, seq)
        unsent: list[tuple[Pipe, Unsent]] = []
        payload = data if raw is None else raw
        for send, header, total, _, pipe in direct.sends:
            taken = send((header, payload))
            if taken != total:
                unsent.append((pipe, Unsent((header, payload), taken)))
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
                rest = self._rest(direct, i, n, Buffers(data, data), unsent, seq, started, timeout)
                late = rest.latest if rest.longest > came - sent else late
                came += rest.waited
                break
        else:
            if unsent:
                came += self._rest(direct, None, 0, Buffers(data, data), unsent, seq, started, timeout).waited
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
        program, binding, moved = direct.program, direct.binding, direct.moved
        binding.runs += 1
        if binding.changed:
            moved = program.adapt()
        self._record((program.subject, seq, started, now, came - sent, now - arrived, late, moved))

    def _spin(self, pipe: Pipe, view: memoryview) -> int:
        """Read until something comes, or for as long as spinning is worth while. Returns the number of bytes."""
        recv, mask = pipe.recv, self.patience.yield_mask
        for idle in range(self.patience.spins):
            if n := recv(view):
                return n
            if not idle & mask:
                yield_core()
        return 0

    def _rest(
        self, direct: Direct, at: Incoming | None, n: int, b: Buffers, unsent: list[tuple[Pipe, Unsent]], seq: int,
        started: float, timeout: float,
    ) -> Exchange:  # fmt: skip
        """Finish an exchange in which the messages before `at` are there, and `n` bytes of `at`. Returns it."""
        stage = direct.stage
        direct.binding.seq = seq
        pending = [] if at is None else stage.incoming[stage.incoming.index(at) :]
        for i in pending:
            i.done = False
        if at is not None and n:
            at.add(n, b)
        pending = [i for i in pending if not i.done]
        exchange = Exchange(
            self._control, self.patience, direct.program, stage, b, pending, unsent, started, timeout, fold_early=False
        )
        exchange.run()
        if direct.binding.changed:  # a bound cast reads the dtype of the run before
            direct.casts.clear()
            for i in stage.incoming:
                if i.side is not None:
                    i.convert(b)
        return exchange

    def run(self, program: Program, b: Buffers, seq: int, timeout: float, started: float) -> None:
        """Run `program` on the caller's buffers.

        Args:
            seq: the number of this call in its group.
            timeout: seconds from `started`, a `perf_counter` time, until the whole of it must be done.

        Raises:
            HostringError: see the module of that name. The buffers' contents are unspecified then.
        """
        for array in (b.data, b.out):
            if type(array) is not _ndarray or array.ndim != 1 or not array.flags.c_contiguous:
                b = Buffers(flat(b.data), flat(b.out), b.raw)
        if program.direct is not None:
            self.run_direct(program.direct, b.data, b.raw, seq, timeout, started)
            return
        binding = program.binding
        binding.seq = seq
        for header in binding.headers:
            _set_seq(header, SEQ_OFFSET, seq)
        folding = waiting = moving = longest = 0.0
        sent, received, late = 0, 0, -1
        for stage in program.stages:
            begun = perf_counter()
            nbytes, unsent = _send(stage, b)
            sent += nbytes
            done, aside = 0, 0.0
            if stage.incoming or unsent:
                rest = Exchange(
                    self._control, self.patience, program, stage, b, stage.incoming, unsent, started, timeout
                )
                rest.run()
                waiting, folding = waiting + rest.waited, folding + rest.folded
                longest, late = max((longest, late), (rest.longest, rest.latest))
                done, aside = rest.steps_done, rest.waited + rest.folded
                received += sum([i.size - HEADER_BYTES for i in stage.incoming])
            moved = perf_counter()
            moving += moved - begun - aside
            for step in stage.steps[done:]:
                step.run(b)
            folding += perf_counter() - moved
        for phase, spent in ((FOLD, folding), (WAIT, waiting), (TRANSFER, moving)):
            self._seconds[phase] += spent
        now = perf_counter()
        self._record((program.subject, seq, started, now, waiting, folding, late, (sent, received)))
        binding.runs += 1
        if binding.changed:
            program.adapt()


def _send(stage: Stage, b: Buffers) -> tuple[int, list[tuple[Pipe, Unsent]]]:
    """Send what the links take of a round's messages.

    Returns the payload bytes of all, and what the links did not take.
    """
    total, unsent = 0, []
    for _, pipe, messages in stage.outgoing:
        buffers = [x for m in messages for x in m.buffers(b)]
        nbytes = sum([len(x) * x.itemsize if isinstance(x, _ndarray) else len(x) for x in buffers])
        taken = pipe.send(buffers)
        if taken != nbytes:
            unsent.append((pipe, Unsent(buffers, taken)))
        total += nbytes - HEADER_BYTES * len(messages)
    return total, unsent
