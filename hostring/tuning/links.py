"""Measures the links of a group and its processors, with schedules that move no caller's data. All ranks call it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final, TypeAlias

import numpy as np

from hostring.cost.network import UNLIMITED, Host, Line, Network
from hostring.engine.binding import Buffers
from hostring.engine.movements import Movements
from hostring.engine.session import Session
from hostring.topologies.routes import Builder
from hostring.topologies.schedule import DATA, Range, Schedule

ROUND_TRIPS: Final = 4
MESSAGES: Final = 8, 40  # of a short and of a long probe, whose difference is used: start and end cost the same
PIECES: Final = 1, 5
PIECE_ELEMENTS: Final = 1 << 16  # 256 KiB
MAX_REPEATS: Final = 50
MIN_REPEATS, MIN_LONG_REPEATS = 20, 3  # a rank that is interrupted in one run is not interrupted in all
MAX_PROBE_S: Final = 0.05  # after so long, no more repeats than the minimum
LINE_BOUND: Final = 1.5  # the line is the limit as long as both ways at once cost less than this times one way
MIN_LATENCY_S, MIN_GAP_S, MIN_COPYING_S = 2e-7, 3e-7, 1e-11  # noise gives no smaller figures; copying is per byte
COPYING_S: Final = 2e-10  # per byte, where the line hides what the processors do

_Build: TypeAlias = "Callable[[Builder, int], None]"  # adds the part of a rank


@dataclass(frozen=True)
class Pair:
    """What was measured between ranks `a` and `b`. Seconds; per byte where it says so."""

    a: int
    b: int
    half_trip: float
    gap: float  # from one small message to the next, one way
    forth: float  # per byte, one way
    back: float  # per byte, the other way
    both: float  # per byte of one way, while the same comes the other way
    near: bool  # the same network stack: there is no line

    @property
    def line_bound(self) -> bool:
        """Whether the line limits it, and not the two processors' copying."""
        return not self.near and self.both < LINE_BOUND * max(self.forth, self.back)


def measure(session: Session, progress: Callable[[str], None] = lambda what: None) -> Network:
    """Measure latency and rate of every link, the cost of a message, the rate of folding. All ranks get the same."""
    probes = _Probes(session)
    links = [
        (a, b)
        for a in range(session.world_size)
        for b in session.tuner.topology.neighbours(a, session.world_size)
        if a < b
    ]
    pairs = []
    for a, b in sorted(links):
        progress(f"link {a} - {b}")
        pairs.append(probes.pair(a, b))
    out, into = [UNLIMITED] * session.world_size, [UNLIMITED] * session.world_size
    for rank in range(session.world_size) if any(p.line_bound for p in pairs) else ():
        progress(f"interface of rank {rank}")
        out[rank], into[rank] = probes.fan(rank, True), probes.fan(rank, False)
    folding = Movements(session).all_gather(np.array([_fold_rate()]))[:, 0]
    return _network(session, pairs, out, into, [float(rate) for rate in folding])


class _Probes:
    """Times schedules on the group's data links."""

    def __init__(self, session: Session) -> None:
        self._session, self._number = session, 0
        self._movements = Movements(session)
        self._data = np.zeros(PIECE_ELEMENTS, np.float32)

    def pair(self, a: int, b: int) -> Pair:
        trip = self._best(a, _ping_pong(a, b), MIN_REPEATS) / ROUND_TRIPS / 2
        few, more = (self._best(a, _stream(a, b, n, 1), MIN_REPEATS) for n in MESSAGES)
        gap = max(MIN_GAP_S, (more - few) / (MESSAGES[1] - MESSAGES[0]))
        forth, back = self._per_byte(a, b, _stream), self._per_byte(b, a, _stream)
        both = self._per_byte(a, b, _exchange)
        ours, theirs = self._session.group.peer_infos[a], self._session.group.peer_infos[b]
        near = ours is not None and theirs is not None and ours.net_id == theirs.net_id
        return Pair(a, b, trip, gap, forth, back, both, near)

    def _per_byte(self, a: int, b: int, kind: Callable[[int, int, int, int], _Build]) -> float:
        """Seconds by the watch of `a`: what a longer one of a kind takes more than a shorter one."""
        few, more = (self._best(a, kind(a, b, n, PIECE_ELEMENTS)) for n in PIECES)
        return max(MIN_COPYING_S, (more - few) / (PIECES[1] - PIECES[0]) / PIECE_ELEMENTS / 4)

    def fan(self, rank: int, out: bool) -> float:
        """Bytes per second that `rank` sends to, or receives from, all its neighbours at once."""
        peers = sorted(self._session.tuner.topology.neighbours(rank, self._session.world_size))
        return PIECES[1] * PIECE_ELEMENTS * 4 * len(peers) / self._best(rank, _fan(rank, peers, out))

    def _best(self, timer: int, build: _Build, least: int = MIN_LONG_REPEATS) -> float:
        """Seconds of the quickest of some runs, by the watch of rank `timer`, known to all."""
        program = self._bind(build)
        best, total = np.array([float("inf"), 0.0]), 0.0
        for repeat in range(MAX_REPEATS):
            began = perf_counter()
            self._session.run(program, Buffers(self._data, self._data[:0]), None, began)
            took = perf_counter() - began
            total += took
            best[:] = min(best[0], took), total
            self._movements.broadcast(best, root=timer)
            total = float(best[1])
            if total > MAX_PROBE_S and repeat + 1 >= least:
                break
        return float(best[0])

    def _bind(self, build: _Build) -> Any:
        builder = Builder()
        build(builder, self._session.rank)
        self._number += 1
        schedule: Schedule = builder.schedule(PIECE_ELEMENTS)
        return self._session.planner.probe(schedule, self._number)


def _message(build: Builder, rank: int, round_: int, src: int, dst: int, n_elements: int) -> None:
    if rank == src:
        build.send(round_, dst, Range(DATA, 0, n_elements))
    elif rank == dst:
        build.recv(round_, src, Range(f"in.{src}", 0, n_elements))


def _ping_pong(a: int, b: int) -> _Build:
    def build(build: Builder, rank: int) -> None:
        for k in range(ROUND_TRIPS):
            _message(build, rank, 2 * k, a, b, 1)
            _message(build, rank, 2 * k + 1, b, a, 1)

    return build


def _stream(a: int, b: int, messages: int, n_elements: int) -> _Build:
    def build(build: Builder, rank: int) -> None:
        for k in range(messages):
            _message(build, rank, k, a, b, n_elements)
        _message(build, rank, messages, b, a, 1)

    return build


def _exchange(a: int, b: int, pieces: int, n_elements: int) -> _Build:
    def build(build: Builder, rank: int) -> None:
        for k in range(pieces):
            _message(build, rank, k, a, b, n_elements)
            _message(build, rank, k, b, a, n_elements)

    return build


def _fan(rank: int, peers: list[int], out: bool) -> _Build:
    """A word to all, then everything to all (or from all), then a word back."""

    def build(build: Builder, at: int) -> None:
        for peer in peers:
            _message(build, at, 0, rank, peer, 1)
            for k in range(1, PIECES[1] + 1):
                _message(build, at, k, *((rank, peer) if out else (peer, rank)), PIECE_ELEMENTS)
            _message(build, at, PIECES[1] + 1, peer, rank, 1)

    return build


def _fold_rate() -> float:
    left, right = np.ones(PIECE_ELEMENTS, np.float32), np.ones(PIECE_ELEMENTS, np.float32)
    times = []
    for _ in range(MAX_REPEATS):
        began = perf_counter()
        np.add(left, right, out=left)
        times.append(perf_counter() - began)
    return left.nbytes / min(times)


def _network(session: Session, pairs: list[Pair], out: list[float], into: list[float], folding: list[float]) -> Network:
    home, cores = _homes(session)
    hosts = []
    for h in range(max(home) + 1):
        ranks = [r for r in range(session.world_size) if home[r] == h]
        mine = [p for p in pairs if p.a in ranks or p.b in ranks]
        copying = min((p.both / 2 for p in mine if not p.line_bound), default=COPYING_S)
        hosts.append(
            Host(
                send_rate=min(out[r] for r in ranks),
                recv_rate=min(into[r] for r in ranks),
                cores=cores[h],
                per_message=min(min(p.gap, p.half_trip / 2) for p in mine),
                per_byte=min([copying, *(max(p.forth, p.back) / 4 for p in mine if p.line_bound)]),
                fold_rate=min(folding[r] for r in ranks),
            )
        )
    special = dict(_lines(pairs, [hosts[h].per_message for h in home]))
    usual = Line(
        statistics.median(line.latency for line in special.values()),
        statistics.median(line.rate for line in special.values()),
    )
    return Network(tuple(hosts), tuple(home), usual, replace(usual, rate=UNLIMITED), special)


def _lines(pairs: list[Pair], per_message: list[float]) -> Iterator[tuple[tuple[int, int], Line]]:
    for p in pairs:
        latency = max(MIN_LATENCY_S, p.half_trip - per_message[p.a] - per_message[p.b])
        for src, dst, cost in ((p.a, p.b, p.forth), (p.b, p.a, p.back)):
            yield (src, dst), Line(latency, 1 / cost if p.line_bound else UNLIMITED)


def _homes(session: Session) -> tuple[list[int], list[int]]:
    """The host of each rank, numbered from 0, and the cores of each host. A network stack counts as a host."""
    members = session.group.peer_infos
    known: dict[str, int] = {}
    home = [known.setdefault(m.net_id if m is not None else f"rank {r}", len(known)) for r, m in enumerate(members)]
    cores = []
    for h in range(len(known)):
        member = next(m for r, m in enumerate(members) if home[r] == h)
        if member is None:
            cores.append(1)
            continue
        machine = [m for m in members if m is not None and m.host_id == member.host_id]
        usable = min(
            float(len({core for m in machine for core in m.cores})), *(m.cpu_quota or UNLIMITED for m in machine)
        )
        cores.append(max(1, round(usable * home.count(h) / len(machine))))
    return home, cores
