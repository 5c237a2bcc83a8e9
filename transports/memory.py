"""Links between ranks that are threads of one process: bounded byte rings, with a socket pair as doorbell."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Hashable, Sequence

import numpy as np

from hostring.errors import PeerLostError, RendezvousError
from hostring.transports.addresses import Address
from hostring.transports.link import Buffer, LinkKey
from hostring.transports.registry import Listener, Met

CAPACITY_BYTES = 1 << 20
"""In flight per direction before `send` takes no more, so that back pressure is as real as on a socket."""


class _Stream:
    """One direction. Only the writer changes `written` and `ended`, only the reader `read`: no lock is needed."""

    __slots__ = (
        "broken",
        "capacity",
        "data",
        "ended",
        "read",
        "reader_gone",
        "reader_sleeps",
        "writer_sleeps",
        "written",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.data = np.empty(capacity, np.uint8).data  # not cleared: most links of a large group carry little
        self.written = 0
        self.read = 0
        self.ended = False
        self.broken = False
        self.reader_gone = False
        self.reader_sleeps = False
        self.writer_sleeps = False

    def put(self, view: memoryview) -> int:
        n = min(view.nbytes, self.capacity - (self.written - self.read))
        at = self.written % self.capacity
        first = min(n, self.capacity - at)
        self.data[at : at + first] = view[:first]
        self.data[: n - first] = view[first:n]
        self.written += n  # last: from here on the reader may look at the bytes
        return n

    def take(self, view: memoryview) -> int:
        n = min(view.nbytes, self.written - self.read)
        if n == 0:
            return 0
        at = self.read % self.capacity
        first = min(n, self.capacity - at)
        view[:first] = self.data[at : at + first]
        view[first:n] = self.data[: n - first]
        self.read += n  # last: from here on the writer may overwrite the bytes
        return n


class MemoryLink:
    """One end of a pair. One thread may send while another receives."""

    __slots__ = ("_bell", "_in", "_out", "peer")

    def __init__(self, peer: int, incoming: _Stream, outgoing: _Stream, bell: socket.socket) -> None:
        self.peer = peer
        self._in = incoming
        self._out = outgoing
        self._bell = bell

    def send(self, buffers: Sequence[Buffer]) -> int:
        """See `Link.send`."""
        out = self._out
        if out.reader_gone or out.ended:
            raise PeerLostError(self.peer, "connection closed")
        taken = 0
        for view in map(_flat, buffers):
            n = out.put(view)
            taken += n
            if n < view.nbytes:
                break
        if taken and out.reader_sleeps:
            out.reader_sleeps = False
            self._ring()
        return taken

    def recv_into(self, view: Buffer) -> int:
        """See `Link.recv_into`."""
        return self.recv_into_all([view])

    def recv_into_all(self, views: Sequence[Buffer]) -> int:
        """See `Link.recv_into_all`."""
        stream = self._in
        ended = stream.ended  # before looking: what was written before the end must still be read
        if stream.broken:
            raise PeerLostError(self.peer, "connection aborted")
        taken = 0
        wanted = False
        for view in map(_flat, views):
            n = stream.take(view)
            taken += n
            wanted = wanted or view.nbytes > 0
            if n < view.nbytes:
                break
        if taken:
            if stream.writer_sleeps:
                stream.writer_sleeps = False
                self._ring()
        elif wanted and ended:
            raise PeerLostError(self.peer, "connection closed")
        return taken

    def fileno(self) -> int:
        """See `Link.fileno`; -1 once closed."""
        return self._bell.fileno()

    def arm(self, recv: bool, send: bool) -> int:
        """See `Link.arm`."""
        with contextlib.suppress(OSError):
            self._bell.recv(4096)
        if recv:
            self._in.reader_sleeps = True
        if send:
            self._out.writer_sleeps = True
        return select.POLLIN

    def close(self) -> None:
        """See `Link.close`."""
        self._out.ended = True
        self._in.reader_gone = True
        self._bell.close()  # the other end of the pair becomes readable for good

    def abort(self) -> None:
        """See `Link.abort`. Keeps the descriptor until `close`, as `SocketLink` does."""
        self._out.broken = self._in.broken = True
        self._out.ended = self._in.ended = True
        self._out.reader_gone = self._in.reader_gone = True
        with contextlib.suppress(OSError):
            self._bell.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        if hasattr(self, "_bell"):
            self.close()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: the peer has rings enough; gone: it will be noticed
            self._bell.send(b"\0")


def _flat(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


def pair(a: int, b: int, capacity: int = CAPACITY_BYTES) -> tuple[MemoryLink, MemoryLink]:
    """Two connected ends: the first for rank `a` (its peer is `b`), the second for rank `b`."""
    bells = socket.socketpair()
    for bell in bells:
        bell.setblocking(False)
    forth, back = _Stream(capacity), _Stream(capacity)
    return MemoryLink(b, back, forth, bells[0]), MemoryLink(a, forth, back, bells[1])


_changed = threading.Condition()
_left: dict[tuple[Hashable, int], dict[int, MemoryLink]] = {}
"""By key and the rank that made the pairs: the other ends, by the rank that each is for, until it has taken it."""


def meet(key: Hashable, rank: int, peer: int, capacity: int = CAPACITY_BYTES) -> MemoryLink:
    """The end for `rank` of its pair with `peer` under `key`. The first makes the pair and leaves the other end."""
    with _changed:
        theirs = _left.get((key, peer), {})
        mine = theirs.pop(rank, None)
        if mine is None:
            mine, other = pair(rank, peer, capacity)
            _left.setdefault((key, rank), {})[peer] = other
        elif not theirs:
            del _left[key, peer]
            _changed.notify_all()
    return mine


def unclaimed(key: Hashable, rank: int, seconds: float) -> set[int]:
    """Wait until all peers have taken the ends that `rank` left under `key`. Returns those that are late."""
    with _changed:
        _changed.wait_for(lambda: (key, rank) not in _left, seconds)
        return set(_left.get((key, rank), {}))


def forget(key: Hashable, rank: int) -> None:
    """Close the ends that `rank` left under `key` and that nobody took."""
    with _changed:
        nobodys = _left.pop((key, rank), {})
    for link in nobodys.values():
        link.close()


def listen(hosts: Sequence[str], port: int) -> list[Listener]:
    """See `TransportModule`. Links are made without sockets to listen at."""
    return []


def usable(address: Address) -> int | None:
    """See `TransportModule`."""
    return None


def make_links(met: Met) -> dict[LinkKey, MemoryLink]:
    """See `TransportModule`. The peers are threads of this process."""
    kinds = sorted({kind for _, kind in met.keys})
    for kind in kinds:
        met.leave.callback(forget, (met.identity, kind), met.rank)
    links = {(peer, kind): meet((met.identity, kind), met.rank, peer) for peer, kind in met.keys}
    for kind in kinds:  # a rank that left before its peers came would take what it had sent with it
        late = unclaimed((met.identity, kind), met.rank, met.deadline - time.monotonic())
        if late:
            for link in links.values():
                link.close()
            names = ", ".join(map(str, sorted(late)))
            raise RendezvousError(f"rank {met.rank} has no link with rank {names} at the deadline", min(late))
    return links
