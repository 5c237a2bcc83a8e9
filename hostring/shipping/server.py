"""The head's end: sends pieces of its files to ranks that ask for them."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hostring.errors import HandshakeError
from hostring.shipping.channel import Channel, answer
from hostring.shipping.extents import MAX_PIECE_NBYTES, Extent
from hostring.shipping.hashes import Hashes
from hostring.store.protocol import typed
from hostring.transports.tcp import listen_at

log = logging.getLogger("hostring")

HELLO_S = 5.0  # for a client to prove that it knows the secret
SEND_S = 60.0  # after which a rank that takes nothing counts as gone; it comes back and asks for the rest
MAX_CONNECTIONS = 256
PROGRESS_S = 1.0  # between two calls of `progress` for one rank


@dataclass
class Sent:
    """What one rank has got.

    Attributes:
        planned: bytes that its part of the plan needs. sent: bytes that were sent. here: bytes that it had already.
    """

    who: str
    planned: int = 0
    sent: int = 0
    here: int = 0

    def __str__(self) -> str:
        had = f" ({self.here / 1e6:,.1f} MB were there)" if self.here else ""
        return f"{self.who}: sent {self.sent / 1e6:,.1f} of {self.planned / 1e6:,.1f} MB{had}"


def listen_on(hosts: Sequence[str]) -> list[socket.socket]:
    """Listen on one free port at each of these addresses that this machine has.

    Raises:
        OSError: it has none of them.
    """
    found: list[socket.socket] = []
    why: OSError | None = None
    for host in hosts:
        try:
            found.append(listen_at(host, found[0].getsockname()[1] if found else 0))
        except OSError as exc:
            why = exc
    if not found:
        raise OSError(f"the model can't be sent from any of {', '.join(hosts) or 'no address'}: {why}")
    return found


class ShipServer:
    """Sends until it is closed. It owns `sockets`, which are bound and listening.

    Args:
        secret: of the group. hashes: of the files.
        progress: told now and then what a rank has got, on any thread.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        secret: bytes,
        hashes: Hashes,
        progress: Callable[[Sent], None] = lambda sent: None,
    ) -> None:
        self.port: int = sockets[0].getsockname()[1]
        self._secret, self._hashes, self._progress = secret, hashes, progress
        self._sockets, self._open = list(sockets), set[socket.socket]()
        self._lock = threading.Lock()
        self._sent: dict[int, Sent] = {}
        self._closed = False
        for listener in sockets:
            listener.setblocking(True)
            threading.Thread(target=self._accept, args=(listener,), name="hostring-ship", daemon=True).start()

    def sent(self) -> dict[int, Sent]:
        """What each rank has got, by rank."""
        with self._lock:
            return dict(self._sent)

    def close(self) -> None:
        """Stop sending."""
        with self._lock:
            self._closed = True
            ending = [*self._sockets, *self._open]
        for sock in ending:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            sock.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # too many open files
                continue
            with self._lock:
                full = self._closed or len(self._open) >= MAX_CONNECTIONS
                if not full:
                    self._open.add(sock)
            if full:
                sock.close()
            else:
                threading.Thread(target=self._serve, args=(sock,), name="hostring-ship", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HELLO_S)
            channel = answer(sock, self._secret)
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while True:
                request = channel.receive()
                sock.settimeout(SEND_S)
                self._answer(channel, request)
                sock.settimeout(None)
        except (OSError, ValueError, TypeError, HandshakeError) as exc:  # a rank that is gone, or a stranger
            log.debug("hostring: a connection for the model's files ended: %s", exc)
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _answer(self, channel: Channel, request: Any) -> None:
        """Send what is asked for, piece by piece; of a piece that the rank has, only its hash."""
        rank = typed(request, "rank", int)
        with self._lock:
            sent = self._sent.setdefault(rank, Sent(""))
        if typed(request, "starts", bool):  # a process that asks for the first time
            sent.sent = sent.here = 0
        sent.who, sent.planned = f"rank {rank} ({typed(request, 'host', str)})", typed(request, "planned", int)
        told = 0.0
        for numbers, known in typed(request, "pieces", list):
            self._send(channel, self._checked(numbers), known, sent)
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                self._progress(sent)
        self._progress(sent)

    def _checked(self, numbers: Any) -> Extent:
        fine = type(numbers) is list and len(numbers) == 5
        if not fine or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{numbers!r} names no piece")
        piece = Extent(*numbers)
        if not 0 < piece.nbytes <= MAX_PIECE_NBYTES or piece.end > self._hashes.nbytes(piece.file):
            raise ValueError(f"{piece} is no piece of these files")
        return piece

    def _send(self, channel: Channel, piece: Extent, known: Any, sent: Sent) -> None:
        digest = self._hashes.known(piece)
        content = b""
        if digest is None or digest != known:
            digest, content = self._hashes.read(piece)
        if digest == known:
            sent.here += piece.nbytes
            channel.send([digest, 0])
        else:
            channel.send([digest, len(content)], content)
            sent.sent += piece.nbytes
