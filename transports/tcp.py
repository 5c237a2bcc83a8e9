"""TCP links (IPv4 and IPv6), and `SocketLink`, the stream-socket link that `unix` shares."""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import sys
import time
from collections.abc import Sequence
from itertools import islice

from hostring.errors import PeerLostError
from hostring.transports.addresses import Address, scope_id
from hostring.transports.link import Buffer, LinkKey
from hostring.transports.registry import Listener, Met

log = logging.getLogger("hostring")

MAX_CALL_BYTES = 1 << 30
"""Bytes for one system call if the kernel refuses more (macOS does from 2 GiB on; Linux takes a part)."""

MAX_CALL_BUFFERS = 512
"""Buffers for one system call if the kernel refuses more (IOV_MAX is 1024 on Linux and macOS, 16 at least)."""

CLOSE_WAIT_S = 0.2  # how long close() waits for bytes that are still on their way

# macOS calls the first one TCP_KEEPALIVE. Seconds, seconds, seconds, probes.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_SIOCOUTQ = 0x5411
_DROP_OUTPUT = b"\1\0\0\0\0\0\0\0"  # SO_LINGER on, with 0 s: close() drops what was not sent


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
        """See `Link.close`. Unread input is thrown away first: it would make close() reset the stream."""
        if self._sock.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._linger(time.monotonic() + CLOSE_WAIT_S)
        self._sock.close()

    def abort(self) -> None:
        """See `Link.abort`."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_OUTPUT)
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
    room = MAX_CALL_BYTES
    for buffer in islice(buffers, MAX_CALL_BUFFERS):
        view = memoryview(buffer)
        if not view.nbytes:  # cast refuses it
            continue
        flat = view.cast("B")[:room]
        less.append(flat)
        room -= flat.nbytes
        if not room:
            break
    whole = len(buffers) <= MAX_CALL_BUFFERS and room > 0
    return None if whole else less


def unacknowledged(sock: socket.socket) -> int:
    """Bytes that may still get lost. 0 if the system can't tell, and for UNIX sockets, which deliver at once."""
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

    TCP_USER_TIMEOUT isn't set: Linux applies it to a closed receive window too, so it kills the link to a live peer
    that is only late to read (measured: 2.5 s after a setting of 2 s), and it makes keepalive wait as long. Keepalive
    does not run while our bytes are unacknowledged; then the deadline of the operation decides.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


HOST_ANSWER_S = 20.0  # without an answer from the kernel at the other end of a control link, its host is gone


def watch(sock: socket.socket) -> None:
    """Notice a dead host even while something of ours is unacknowledged. For links that carry a few bytes now and then.

    TCP_USER_TIMEOUT does no harm there, unlike in `tune`: so little always fits the window, and the kernel of a live
    host acknowledges it whatever its process does.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(HOST_ANSWER_S * 1000))


def wrap(sock: socket.socket, peer: int, kind: str = "data") -> SocketLink:
    """Make a connected socket the link to `peer`."""
    tune(sock)
    if kind == "control":
        watch(sock)
    return SocketLink(sock, peer)


def listen_at(host: str, port: int, backlog: int = 1024) -> socket.socket:
    """A non-blocking listening socket at one numeric address ("::" takes IPv4 too); port 0 picks a free one."""
    bare, _, scope = host.partition("%")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if bare == "::" else 1)
        sock.bind((bare, port, 0, scope_id(scope)) if family == socket.AF_INET6 else (bare, port))
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def listen(hosts: Sequence[str], port: int) -> list[Listener]:
    """See `TransportModule`. Addresses that can't be listened at are left out."""
    listeners, reasons = [], []
    for host in hosts:
        try:
            sock = listen_at(host, port)
        except OSError as exc:
            reasons.append(f"{host} port {port}: {exc}" if port else f"{host}: {exc}")
            log.info("hostring: this rank can't listen on %s", reasons[-1])
        else:
            listeners.append(Listener(sock, (host, sock.getsockname()[1])))
    if not listeners:
        raise OSError(f"none of its addresses can be used ({'; '.join(reasons)})")
    return listeners


def usable(address: Address) -> int | None:
    """See `TransportModule`."""
    return None if address[0].startswith(("@", "/")) else 0


def make_links(met: Met) -> dict[LinkKey, SocketLink]:
    """See `TransportModule`."""
    return {(peer, kind): wrap(sock, peer, kind) for (peer, kind), sock in met.sockets.items()}
