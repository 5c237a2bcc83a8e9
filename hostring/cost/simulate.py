"""What schedules cost: all ranks' schedules run together on a model of hosts and links. No I/O, no clock, no state.

A rank does one thing at a time, as the engine does. In each round it hands its messages to the kernel, receives, folds,
and ends the round when all its messages are sent and received. Messages queue for the sender's interface, for the line
and for the receiver's interface, each full duplex. Ranks queue for the cores of their host when it has too few.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hostring.arrays.fold import Expression
from hostring.cost.network import UNLIMITED, Network
from hostring.engine.frames import HEADER_BYTES
from hostring.topologies.schedule import Range, Round, Schedule

Resource: TypeAlias = "tuple[str, int] | tuple[str, int, int]"


@dataclass(frozen=True)
class Price:
    """What one collective costs.

    Attributes:
        seconds: until the last rank is done. finish: until each rank is done.
        busy: seconds for which each resource is taken: ("cpu", rank), ("out", host), ("in", host), ("line", src, dst).
    """

    seconds: float
    finish: tuple[float, ...] = ()
    busy: dict[Resource, float] = field(default_factory=dict)

    @property
    def busiest(self) -> Resource | None:
        """The resource that is taken longest: what to make faster first."""
        return max(self.busy, key=lambda r: self.busy[r], default=None)


@dataclass(frozen=True)
class _Step:
    """A round in bytes: what goes to each peer, what comes from each, and what is folded."""

    sends: dict[int, int]
    recvs: dict[int, tuple[int, int]]  # (messages, bytes)
    folded: int


def price(schedules: Sequence[Schedule], network: Network, itemsize: int, raw_itemsize: int | None = None) -> Price:
    """Run `schedules`, one per rank, on `network`.

    Args:
        itemsize: bytes of an element on the wire; `raw_itemsize`: of a contribution or result that travels in 16 bits.
    """
    raw = itemsize if raw_itemsize is None else raw_itemsize
    return _Run([[_in_bytes(r, itemsize, raw) for r in s.rounds] for s in schedules], network).price()


def _in_bytes(round_: Round, itemsize: int, raw_itemsize: int) -> _Step:
    sends: dict[int, int] = {}
    for send in round_.sends:
        sends[send.peer] = (
            sends.get(send.peer, 0)
            + HEADER_BYTES
            + len(send.what) * (raw_itemsize if send.raw or send.result else itemsize)
        )
    recvs: dict[int, tuple[int, int]] = {}
    for recv in round_.recvs:
        messages, nbytes = recvs.get(recv.peer, (0, 0))
        recvs[recv.peer] = (
            messages + 1,
            nbytes + HEADER_BYTES + len(recv.into) * (raw_itemsize if recv.raw or recv.result else itemsize),
        )
    return _Step(sends, recvs, sum(max(1, _pairs(f.sources)) * len(f.into) * itemsize for f in round_.folds))


def _pairs(node: Expression) -> int:
    return 0 if isinstance(node, Range) else 1 + _pairs(node[0]) + _pairs(node[1])


_WORK, _UNTIL, _ARRIVAL = range(3)  # a rank waits for: seconds of processor time, a point in time, any message
_Process: TypeAlias = "Generator[tuple[int, float], float, None]"


class _Run:
    def __init__(self, steps: Sequence[Sequence[_Step]], network: Network) -> None:
        self.network = network
        self.steps = steps
        ranks = range(len(steps))
        self.cores = {
            h: [0.0] * host.cores for h, host in enumerate(network.hosts) if network.ranks_on(h) > host.cores
        }  # only where ranks must share
        self.free: dict[Resource, float] = {}
        self.busy: dict[Resource, float] = {}
        self.arrivals: dict[
            tuple[int, int], deque[tuple[float, float]]
        ] = {}  # (src, dst) -> (first byte, last byte) of each round's messages
        self.waiting: set[int] = set()
        self.finish = [0.0] * len(steps)
        self.events = [(0.0, rank) for rank in ranks]
        self.processes = [self._process(rank) for rank in ranks]

    def price(self) -> Price:
        for process in self.processes:
            next(process)
        while self.events:
            now, rank = heapq.heappop(self.events)
            try:
                wanted, amount = self.processes[rank].send(now)
            except StopIteration:
                self.finish[rank] = now
                continue
            if wanted == _ARRIVAL:
                self.waiting.add(rank)
            else:
                then = self._compute(rank, now, amount) if wanted == _WORK else max(now, amount)
                heapq.heappush(self.events, (then, rank))
        return Price(max(self.finish, default=0.0), tuple(self.finish), self.busy)

    def _compute(self, rank: int, now: float, seconds: float) -> float:
        """The time at which `rank` has had the processor for `seconds`."""
        self._take(("cpu", rank), seconds)
        cores = self.cores.get(self.network.home[rank])
        if cores is None or not seconds:
            return now + seconds
        core = min(range(len(cores)), key=cores.__getitem__)
        cores[core] = max(now, cores[core]) + seconds
        return cores[core]

    def _take(self, resource: Resource, seconds: float) -> None:
        self.busy[resource] = self.busy.get(resource, 0.0) + seconds

    def _process(self, rank: int) -> _Process:
        host = self.network.host(rank)
        now = yield _UNTIL, 0.0
        for step in self.steps[rank]:
            out = now
            queued = self.free.get(("out", self.network.home[rank]), 0.0)
            for peer, nbytes in step.sends.items():
                copying = nbytes * host.per_byte
                now = yield _WORK, host.per_message + copying
                out = max(
                    out, self._post(rank, peer, nbytes, self._shared(rank, nbytes, step), queued, now - copying, now)
                )
            waiting = dict(step.recvs)
            folding = step.folded / host.fold_rate / max(1, len(waiting))
            if not waiting and folding:
                now = yield _WORK, folding
            while waiting:
                first, last, sender = self._next_arrival(rank, waiting)
                if sender is None or first > now:
                    now = yield (_ARRIVAL, 0.0) if sender is None else (_UNTIL, first)
                    continue
                self.arrivals[sender, rank].popleft()
                messages, nbytes = waiting.pop(sender)
                now = yield _WORK, messages * host.per_message + nbytes * host.per_byte
                now = yield _UNTIL, last
                now = yield _WORK, folding
            now = yield _UNTIL, out

    def _next_arrival(self, rank: int, waiting: dict[int, tuple[int, int]]) -> tuple[float, float, int | None]:
        """Of the messages on their way to `rank`, the one that arrives first: first byte, last byte, sender."""
        best: tuple[float, float, int | None] = (UNLIMITED, UNLIMITED, None)
        for peer in waiting:
            queue = self.arrivals.get((peer, rank))
            if queue:
                best = min(best, (*queue[0], peer), key=lambda m: m[:2])
        return best

    def _shared(self, rank: int, nbytes: int, step: _Step) -> int:
        """Bytes that leave the host before a message of `nbytes` has: the kernel serves a round's messages in turn."""
        home = self.network.home
        return sum(min(n, nbytes) for peer, n in step.sends.items() if home[peer] != home[rank])

    def _post(self, src: int, dst: int, nbytes: int, shared: int, queued: float, begin: float, end: float) -> float:
        """Send a message whose bytes the kernel gets from `begin` to `end`. Returns when the sender may go on.

        Args:
            shared: see `_shared`. queued: when the host's interface has sent what it had before this round.
        """
        network, line = self.network, self.network.between(src, dst)
        src_host, dst_host = network.home[src], network.home[dst]
        sender, receiver = network.hosts[src_host], network.hosts[dst_host]
        far = src_host != dst_host
        if far:
            self._pass(("out", src_host), nbytes, sender.send_rate, begin, end)
            begin = max(begin, queued)
            end = max(end, begin + shared / sender.send_rate)
        begin, end = self._pass(("line", src, dst), nbytes, line.rate, begin, end)
        away = end
        begin, end = begin + line.latency, end + line.latency
        if far:
            begin, end = self._pass(("in", dst_host), nbytes, receiver.recv_rate, begin, end)
        self.arrivals.setdefault((src, dst), deque()).append((begin, end))
        if dst in self.waiting:
            self.waiting.discard(dst)
            heapq.heappush(self.events, (begin, dst))
        slowest = min(line.rate, sender.send_rate if far else UNLIMITED)
        return away if slowest == UNLIMITED else away - network.buffered / slowest

    def _pass(self, resource: Resource, nbytes: int, rate: float, begin: float, end: float) -> tuple[float, float]:
        """When the first and the last byte leave `resource`, which serves one message after another at `rate`."""
        seconds = nbytes / rate
        self._take(resource, seconds)
        begin = max(begin, self.free.get(resource, 0.0))
        self.free[resource] = begin + seconds
        return begin, max(end, begin + seconds)
