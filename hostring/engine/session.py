"""One group at one rank: its state, and what every call does: it gets a number, runs, and may fail."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from time import perf_counter
from typing import Any, Final

from hostring.arrays.adapter import Adapter
from hostring.arrays.dtypes import FLOAT32, WIRES, Array, DType, rounds_results
from hostring.arrays.overlaps import check_held
from hostring.engine import fork
from hostring.engine.binding import Buffers
from hostring.engine.causes import fresh_copy
from hostring.engine.choice import Tuner
from hostring.engine.control import Control
from hostring.engine.counters import STAGE, Counters
from hostring.engine.engine import Engine
from hostring.engine.frames import numbered
from hostring.engine.memory import HostMemory
from hostring.engine.messenger import Messenger
from hostring.engine.planner import Planner
from hostring.engine.program import Program
from hostring.engine.receiving import Pipe
from hostring.engine.recorder import Recorder
from hostring.engine.waits import Waiting
from hostring.engine.work import Turns
from hostring.errors import GroupClosedError, HostringError, PeerLostError
from hostring.group.group import Group
from hostring.group.peers import Neighbours

SPINS: Final = 2000  # about 2 ms: longer than the skew between ranks within a layer, too short to be noticed
SHARED_SPINS: Final = 32  # each yields the core: 3 or 4 ranks on 2 cores take half the time; more spins don't help
ABORT_WAIT_S: Final = 1.0  # how long `abort` and `reform` wait for the group's threads


class Session:
    """The state of one group at one rank.

    Whoever runs programs holds `turns.turn`, or is the only thread that uses the group.

    Attributes:
        group: the links. rank, world_size: of this group.
        order, wire, topology, timeout: as `hostring.init` took them.
        tuner: chooses schedules. planner: makes programs and keeps them. engine: runs them.
        memory: host memory in which arrays are staged.
        control: the first failure, and who waits for whom. messenger: point-to-point messages.
        counters, recorder: what was done. turns: the order of calls over all threads.
        seq: the number of the next call.
        closed: why no call is accepted any more, or None.
        rounds: whether float32 contributions are rounded before they travel. rounds_results: and so are results.
    """

    def __init__(self, group: Group, *, topology: str, order: str, wire: str, timeout: float) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.order, self.wire, self.topology, self.timeout = order, wire, topology, timeout
        self.rounds, self._rounded_to, self.rounds_results = wire != "float32", WIRES[wire], rounds_results(wire)
        pipes = {peer: Pipe(link) for peer, link in group.data.items()}
        self.counters = Counters(pipes)
        self.tuner = Tuner(topology, order, group.world_size)
        self.control = Control(group.rank, group.control)
        self.recorder = Recorder(group.name, group.rank, group.world_size)
        self.engine = Engine(self.control, self.counters, self.recorder, *_spins(group))
        self.planner = Planner(group.rank, group.world_size, self.tuner, order, group.epoch, pipes, self.counters, wire)
        self.memory = HostMemory()
        self.messenger = Messenger(group.rank, group.p2p, self.control, self.counters, group.epoch)
        self.turns = Turns(f"hostring-{group.name}-{group.rank}")
        self.seq = 0
        self.closed: str | None = None
        self._closing = self._released = False  # released: links and store are given up
        self._lock = threading.Lock()
        if group.world_size > 1:
            fork.inherited.add(self)

    @property
    def memory_held(self) -> int:
        """Bytes of scratch, staging and kept buffers."""
        return self.memory.nbytes + self.planner.memory_held

    def describe(self) -> str:
        """Rank, contract and state in a few words, for people."""
        state = self.closed or (f"failed: {self.control.cause}" if self.control.cause is not None else None)
        return (
            f"rank {self.rank} of {self.world_size}, order={self.order!r}, wire={self.wire!r}, "
            f"topology={self.topology!r}, transport={self.group.config.transport!r}{', ' + state if state else ''}"
        )

    def travels_as(self, dtype: DType) -> DType:
        """The dtype in which a contribution of `dtype` travels."""
        return self._rounded_to if self.rounds and dtype == FLOAT32 else dtype

    # ------------------------------------------------------------------ calls

    def run(self, program: Program, b: Buffers, timeout: float | None, started: float, count: bool = True) -> None:
        """Run one program under the next sequence number.

        Args:
            timeout: seconds, instead of the group's. started: when the call began; staging took the time since.
            count: False for the first half of a call, which shares its number with the second.
        """
        self.check_alive()
        staged = perf_counter()
        try:
            self.engine.run(program, b, self.seq, self.timeout if timeout is None else timeout, staged)
        except BaseException as exc:
            raise self.fail(exc, program, staged) from exc
        self.counters.phases[STAGE] += staged - started
        if count:
            self.seq += 1
            self.counters.calls[program.call.collective] += 1

    def run_alone(self, collective: str) -> None:
        """Count a call of a group of one rank, which moves nothing."""
        self.check_alive()
        self.counters.calls[collective] += 1

    def stage(self, adapter: Adapter, x: Any, host: Array) -> None:
        """Copy `x` into `host`. What an adapter raises here ends the group: other ranks may be in this call already."""
        try:
            adapter.stage(x, host)
        except BaseException as exc:
            raise self.fail(exc) from exc

    def unstage(
        self, adapter: Adapter, host: Array, x: Any, shape: tuple[int, ...] | None = None, *, agreed: bool = False
    ) -> Any:
        """Bring `host` back, as `Adapter.unstage` does.

        Args:
            agreed: all ranks know which elements of `x` share memory; otherwise these must have got equal values.
        """
        try:
            result = adapter.unstage(host, x, shape)
            if shape is None and not agreed:
                check_held(adapter, host, x)
            return result
        except BaseException as exc:
            raise self.fail(exc) from exc

    def check_alive(self) -> None:
        """Raises: HostringError, when the group has failed or was closed."""
        if self.control.cause is not None:
            raise fresh_copy(self.control.cause)
        if self.closed is not None:
            raise GroupClosedError(f"rank {self.rank} has {self.closed} this group; make a new one with hostring.init")

    def known_failure(self) -> HostringError | None:
        """What this rank can see now of a failure, also outside of calls: the first cause, or a rank that has died."""
        return None if self._released else self.control.known_failure()

    def fail(self, exc: BaseException, program: Program | None = None, started: float = 0.0) -> BaseException:
        """Poison the group with the first cause, tell all ranks, and return what to raise here."""
        if self.closed is not None and self.control.cause is None:
            return GroupClosedError(f"rank {self.rank} has {self.closed} this group while a call was under way")
        if isinstance(exc, HostringError):
            call = None if program is None else Waiting(-1, program.call.collective, program.call, self.seq)
            cause = self.control.settle(exc, call)
            if cause is exc and isinstance(exc, PeerLostError) and exc.rank is not None and program is not None:
                cause = PeerLostError(exc.rank, f"{exc.reason}, in {program.call.collective} {numbered(self.seq)}")
        else:
            cause = HostringError(f"rank {self.rank} left a call by {type(exc).__name__}: {exc}", self.rank)
        self.control.flood(cause)
        self.messenger.abort(cause)
        if program is not None:
            culprit = -1 if cause.rank is None else cause.rank
            self.recorder.record((program.subject, self.seq, started, perf_counter(), 0.0, 0.0, culprit, (0, 0)))
        self.recorder.dump(str(cause))
        return fresh_copy(cause) if isinstance(exc, HostringError) else exc

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """See `Comm.close`."""
        with self._lock:
            if self._released or self._closing:
                return
            self._closing = True
        if not self.turns.close(self.timeout):
            self.abort(f"what it had accepted was not done {self.timeout:.1f} s after it closed the group")
        with self._lock:
            if self._released:  # aborted meanwhile
                return
            self.closed, self._released = self.closed or "closed", True
        self.messenger.close()
        self.recorder.dump()
        self.control.farewell()
        self.group.close()

    def lose(self, rank: int, reason: str) -> None:
        """Fail the group: `rank` is silent. Calls under way on this rank end at once. Any thread may call this."""
        cause = self.control.unless_cut_off(PeerLostError(rank, reason))
        with self._lock:
            if self._released or self.closed is not None or self.control.cause is not None:
                return
            self.control.flood(cause)
        for link in self.group.data.values():  # a call that sleeps wakes up, and finds the cause
            link.abort()
        self.messenger.abort(cause)

    def abort(self, reason: str) -> None:
        """See `Comm.abort`."""
        with self._lock:
            if self._released:
                return
            self.closed, self._released = f"aborted: {reason}", True
        cause = HostringError(f"rank {self.rank} aborted the group: {reason}", self.rank)
        self.control.flood(cause)
        for link in self.group.data.values():
            link.abort()
        self.messenger.abort(cause)
        self.messenger.close(ABORT_WAIT_S)
        self.turns.close(ABORT_WAIT_S)
        self.group.close()

    def reform(
        self, min_ranks: int, timeout: float | None, neighbours: Neighbours, contract: Mapping[str, Any]
    ) -> Group:
        """The links of a rebuilt group: see `Comm.rebuild`. This session is closed."""
        if self._released:
            self.check_alive()
        self.group.check_store()
        with self._lock:
            self.closed = self.closed or "rebuilt"
        if self.control.cause is None:
            self.control.flood(HostringError(f"rank {self.rank} rebuilds the group", self.rank))
        self.messenger.close(0.0)
        self.turns.close(ABORT_WAIT_S)
        group = self.group.reform(
            self.control.alive,
            min_ranks=min_ranks,
            timeout=self.timeout if timeout is None else timeout,
            neighbours=neighbours,
            contract=contract,
        )
        self._released = True
        return group

    def leave_to_parent(self) -> None:
        """In a forked child: refuse every call, release the links. Locks may be held by threads that don't exist."""
        refusal = fork.refusal(self.rank)
        self.control.cause = refusal
        self.turns, self._lock = Turns(f"hostring-{self.group.name}-{self.rank}"), threading.Lock()
        self.messenger.forsake(refusal)
        self.closed, self._released = "left", True
        fork.release(self.group.links)


def _spins(group: Group) -> tuple[int, bool]:
    """How often to look before sleeping, and whether ranks share cores: then every look yields the core to the others.

    Sleeping and waking takes longer than a small collective, but a rank that spins keeps the others from a shared core.
    """
    me = group.peer_infos[group.rank]
    here = [m for m in group.peer_infos if m is not None and me is not None and m.host_id == me.host_id]
    if len({m.pid for m in here}) < len(here):  # ranks that share one interpreter take turns anyway
        return 0, True
    cores = {core for m in here for core in m.cores}
    quota = min((m.cpu_quota for m in here if m.cpu_quota is not None), default=float("inf"))
    shared = len(here) > min(len(cores), quota)
    return (SHARED_SPINS if shared else SPINS), shared
