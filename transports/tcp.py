"""TCP links (IPv4 and IPv6), and `SocketLink`, the stream-socket link that `unix` shares."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import sys
import time
from collections.abc import Sequence
from itertools import islice

from hostring.errors import PeerLostError
from hostring.transports.addresses import listen
from hostring.transports.link import Buffer

__all__ = ["SocketLink", "listen", "tune", "wrap"]

SYSCALL_LIMIT = 1 << 30
"""Bytes for one system call where the kernel refuses more (macOS does from 2 GiB on; Linux shortens by itself)."""

BUFFERS_LIMIT = 512
"""Buffers for one system call where the kernel refuses more (IOV_MAX is 1024 on Linux and macOS, 16 at least)."""

MOMENT = 0.2
"""Seconds that `close` may spend on getting bytes out that are still on their way."""

# macOS calls the first one TCP_KEEPALIVE. Seconds, seconds, seconds, probes.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_SIOCOUTQ = 0x5411


class SocketLink:
    """A link over a connected stream socket, which it owns from now on.

    `abort` ends the stream at once but keeps the descriptor's number reserved until `close` (or until the link is
    dropped): another thread may be polling that number, and must not meet an unrelated file under it.
    """

    __slots__ = ("_recv_into", "_recvmsg_into", "_sendmsg", "_sock", "peer")

    def __init__(self, sock: socket.socket, peer: int) -> None:
        sock.setblocking(False)
        self.peer = peer
        self._sock = sock
        self._sendmsg = sock.sendmsg
        self._recv_into = sock.recv_into
        self._recvmsg_into = sock.recvmsg_into

    def send(self, buffers: Sequence[Buffer]) -> int:
        """See `Link.send`."""
        try:
            return self._sendmsg(buffers)
        except BlockingIOError:
            return 0
        except OSError as exc:
            return self._send_clamped(buffers, exc)

    def recv_into(self, view: Buffer) -> int:
        """See `Link.recv_into`."""
        try:
            n = self._recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as exc:
            return self._recv_clamped([view], exc)
        if n == 0 and len(view):
            raise PeerLostError(self.peer, "connection closed")
        return n

    def recv_into_all(self, views: Sequence[Buffer]) -> int:
        """See `Link.recv_into_all`."""
        try:
            n = self._recvmsg_into(views)[0]
        except BlockingIOError:
            return 0
        except OSError as exc:
            return self._recv_clamped(views, exc)
        if n == 0 and any(map(len, views)):
            raise PeerLostError(self.peer, "connection closed")
        return n

    def fileno(self) -> int:
        """See `Link.fileno`; -1 once closed."""
        return self._sock.fileno()

    def arm(self, recv: bool, send: bool) -> int:
        """See `Link.arm`. A socket is its own doorbell."""
        return (select.POLLIN if recv else 0) | (select.POLLOUT if send else 0)

    def close(self) -> None:
        """See `Link.close`. Unread input is thrown away first: closing over it would reset the stream, and what we sent with it."""
        if self._sock.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._linger(time.monotonic() + MOMENT)
        self._sock.close()

    def abort(self) -> None:
        """See `Link.abort`."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # on, 0 s: drop the output at close
            self._sock.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        if hasattr(self, "_sock"):
            self._sock.close()

    def _linger(self, until: float) -> None:
        scratch = bytearray(1 << 16)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while unacknowledged(self._sock) and time.monotonic() < until:
            poll.poll(10)
            self._drain(scratch)
        self._drain(scratch)

    def _drain(self, scratch: bytearray) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(256):  # bounded, should the peer never stop sending
                if not self._recv_into(scratch):
                    return

    def _send_clamped(self, buffers: Sequence[Buffer], exc: OSError) -> int:
        less = clamp(buffers, exc)
        if less is None:
            raise PeerLostError(self.peer, f"send: {exc}") from exc
        try:
            return self._sendmsg(less)
        except BlockingIOError:
            return 0
        except OSError as again:
            raise PeerLostError(self.peer, f"send: {again}") from again

    def _recv_clamped(self, views: Sequence[Buffer], exc: OSError) -> int:
        less = clamp(views, exc)
        if less is None:
            raise PeerLostError(self.peer, f"recv: {exc}") from exc
        try:
            n = self._recvmsg_into(less)[0]
        except BlockingIOError:
            return 0
        except OSError as again:
            raise PeerLostError(self.peer, f"recv: {again}") from again
        if n == 0:
            raise PeerLostError(self.peer, "connection closed")
        return n


def clamp(buffers: Sequence[Buffer], exc: OSError) -> list[memoryview] | None:
    """The front of `buffers` that any kernel takes in one call; None when `exc` has another cause than their amount."""
    if exc.errno not in (errno.EINVAL, errno.EMSGSIZE):
        return None
    less: list[memoryview] = []
    room = SYSCALL_LIMIT
    for buffer in islice(buffers, BUFFERS_LIMIT):
        view = memoryview(buffer)
        if not view.nbytes:  # cast refuses it
            continue
        flat = view.cast("B")[:room]
        less.append(flat)
        room -= flat.nbytes
        if not room:
            break
    whole = len(buffers) <= BUFFERS_LIMIT and room > 0
    return None if whole else less


def unacknowledged(sock: socket.socket) -> int:
    """Bytes that may still get lost. 0 where the system can't tell, and for UNIX sockets, whose bytes are with the peer at once."""
    if sys.platform != "linux" or sock.family == socket.AF_UNIX:
        return 0
    import array
    import fcntl

    waiting = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), _SIOCOUTQ, waiting)
    except OSError:
        return 0
    return waiting[0]


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and let the kernel find out within half a minute that an idle peer's host is gone.

    TCP_USER_TIMEOUT is left alone: Linux applies it to a closed receive window too, and so it kills the link to a live
    peer that is merely late to read (measured: 2.5 s after a setting of 2 s), and it makes keepalive wait as long. While
    our bytes are unacknowledged there is no keepalive; there, the deadline of the operation decides.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


HOST_SECONDS = 20.0
"""After so long without an answer from the kernel of the host at the other end of a watched link, that host is gone."""


def watch(sock: socket.socket) -> None:
    """Notice a dead host even while something of ours is unacknowledged. For links that carry a few bytes now and then.

    There, unlike in `tune`, TCP_USER_TIMEOUT does no harm: so little always fits the window, and the kernel of a live host
    acknowledges it whatever its process does.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(HOST_SECONDS * 1000))


def wrap(sock: socket.socket, peer: int) -> SocketLink:
    """Make a connected socket the link to `peer`."""
    tune(sock)
    return SocketLink(sock, peer)
