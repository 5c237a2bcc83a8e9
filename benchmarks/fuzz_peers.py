"""What reads bytes from peers and from a store: each reader takes any bytes; `good_*` are inputs that it accepts."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from hostring.arrays.dtypes import MXINT8, PAYLOAD_CODES
from hostring.engine.binding import Buffers
from hostring.engine.control import Control
from hostring.engine.counters import Counters
from hostring.engine.engine import Engine
from hostring.engine.frames import EXPECTED_BYTES, HEADER_BYTES, Call, decode, payload_fields
from hostring.engine.messenger import Messenger
from hostring.engine.receiving import Pipe
from hostring.engine.session import Session
from hostring.errors import HostringError, PeerLostError
from hostring.group import handshake
from hostring.group.group import Group
from hostring.group.handshake import RefusedError
from hostring.group.peer_info import Entry, PeerInfo, this_peer
from hostring.store import protocol as message
from hostring.store.client import _Connection

SECRET = b"fuzz"


class Feed:
    """A link on which `data` comes in, and then the peer is gone."""

    peer = 1

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def send(self, buffers: Sequence[Any]) -> int:
        return sum(memoryview(b).nbytes for b in buffers)

    def recv_into(self, view: Any) -> int:
        into = memoryview(view).cast("B")
        n = min(len(into), len(self._left))
        if not n and len(into):
            raise PeerLostError(self.peer, "connection closed")
        into[:n] = self._left[:n]
        self._left = self._left[n:]
        return n

    def recv_into_all(self, views: Sequence[Any]) -> int:
        return self.recv_into(next(v for v in views if memoryview(v).nbytes))

    def fileno(self) -> int:
        return -1

    def arm(self, recv: bool, send: bool) -> int:
        return 0

    def close(self) -> None: ...

    abort = close


@functools.cache
def hello(rank: int = 1) -> handshake.Hello:
    return handshake.Hello(b"g" * 16, bytes([rank]) * 16, 3, rank, "data", {"order": "rank"}, this_peer([]))


def greet(data: bytes) -> None:
    """First and second message, to either side."""
    for make in (
        lambda: handshake.accept(lambda kind: hello(0), lambda theirs: None, SECRET),
        lambda: handshake.dial(hello(2), 1, SECRET),
    ):
        for good in ([], [hello().to_bytes(b"n" * 16)]):
            protocol = make()
            next(protocol)
            try:
                for said in [*good, data]:
                    protocol.send(said)
            except (RefusedError, StopIteration):
                continue


def header(data: bytes) -> None:
    found = decode(data.ljust(HEADER_BYTES, b"\0"))
    if found is not None:
        found.describe()


def _alone(data: bytes) -> tuple[Engine, Any]:
    """An engine, and the planner of rank 0 of two, on whose link `data` comes."""
    pipes = {1: Pipe(Feed(data))}
    counters = Counters(pipes)
    group = Group(0, 2, "fuzz", 7, SECRET, peer_infos=[None, None])
    group.data = {1: Feed(data)}
    session = Session(group, topology="mesh", order="rank", wire="float32", timeout=1.0)
    return session.engine, (session, counters)


def frames(data: bytes) -> None:
    """A whole all-reduce, small and large, of float32."""
    engine, (session, _) = _alone(data)
    x = np.arange(6, dtype=np.float32)
    program = session.planner.all_reduce(6, x.dtype, "sum", None)
    with np.errstate(all="ignore"):
        engine.run(program, Buffers(x, np.empty(0, np.float32)), 0, 0.0, time.perf_counter())


def good_frames() -> list[bytes]:
    call = Call("all_reduce", "sum", 0, "rank", 6, epoch=7)
    _, (session, _) = _alone(b"")
    program = session.planner.all_reduce(6, np.dtype(np.float32), "sum", None)
    ours = bytes(program.stages[0].incoming[0].header)
    blocks = ours[:EXPECTED_BYTES] + payload_fields(PAYLOAD_CODES[MXINT8], 7) + bytes([1, 2, 3, 4, 5, 6, 127])
    return [ours + np.arange(6, dtype=np.float32).tobytes(), blocks, bytes(call.header(0, 0, 0, 24)) + bytes(24)]


def messages(data: bytes) -> None:
    """A point-to-point link, with a receive posted."""
    messenger = Messenger(0, {1: Feed(data)}, Control(0, {}), Counters({}), 7)
    into = np.zeros(3, np.float32)
    work = messenger.recv(into, 1, 5, 1.0, into, None)
    messenger._traffic.move()
    if (error := work.exception()) is not None and not isinstance(error, HostringError):
        raise error


def control(data: bytes) -> None:
    ear = Control(0, {1: Feed(data)})
    ear._read(1)


def good_control() -> list[bytes]:
    bodies = [
        {"what": "abort", "kind": "PeerLostError", "message": "connection closed", "rank": 2},
        {"what": "probe"},
        {
            "what": "state",
            "waits_for": 2,
            "seq": 4,
            "header": bytes(Call("barrier", None, 0, "rank", 0).header(0, 0, 0, 0)),
        },
        {"what": "farewell"},
    ]
    packed = [msgpack.packb(body) for body in bodies]
    single = [b"hCtl" + len(p).to_bytes(4, "little") + p for p in packed]
    return [*single, b"".join(single)]


def entry(data: bytes) -> None:
    Entry.from_bytes(1, data)


def peer_info(data: bytes) -> None:
    PeerInfo.from_dict(message.unpack(data))


class _Answers:
    """A socket on which a store answers."""

    def __init__(self, data: bytes) -> None:
        self._left = data

    def settimeout(self, seconds: float) -> None: ...

    def setsockopt(self, *args: Any) -> None: ...

    def sendall(self, data: bytes) -> None: ...

    def recv(self, nbytes: int) -> bytes:
        got, self._left = self._left[:nbytes], self._left[nbytes:]
        return got


def store_answers(data: bytes) -> None:
    """What a client reads: a greeting and a verdict. Then answers, on a connection that is believed."""
    with contextlib.suppress(OSError, ValueError):
        _Connection(_Answers(data), b"c" * 16, SECRET, 1.0)  # type: ignore[arg-type]
    believed = _Connection.__new__(_Connection)
    believed.sock = _Answers(data)  # type: ignore[assignment]
    believed.call(5, b"", 1.0)
