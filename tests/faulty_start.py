"""Ranks that misbehave while their group forms: in their hello, or at the store."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from faulty import BY_PROCESS, HARMLESS, LINGER_NOT, Fault, Vanished

from hostring.group import greeting, tasks
from hostring.group.connecting import Connecting
from hostring.store.client import MAX_MESSAGE_BYTES, TcpStore
from hostring.store.protocol import PREFIX, framed, pack

_starting = threading.local()  # which fault the rank that starts in this thread has, and its links so far


@contextlib.contextmanager
def bad_hello(fault: Fault) -> Iterator[None]:
    """While this lasts, the rank that starts in this thread misbehaves in its hello. Needs `hellos_spoiled`."""
    _starting.fault = fault
    try:
        yield
    finally:
        _starting.fault = None


@contextlib.contextmanager
def hellos_spoiled() -> Iterator[None]:
    """Lets `bad_hello` work: puts itself between the hellos and their sockets."""
    send, receive, run = greeting.send, greeting.receive, Connecting.run

    def bad_run(self: Any, *until: Any) -> None:
        _starting.greeted = self.greeted
        run(self, *until)

    async def bad_send(sock: socket.socket, data: bytes, until: float) -> None:
        fault: Fault | None = getattr(_starting, "fault", None)
        if fault is None or fault.name == "none" or await _spoil_hello(fault, sock, data):
            await send(sock, data, until)

    async def bad_receive(sock: socket.socket, nbytes: int, until: float) -> bytes:
        fault: Fault | None = getattr(_starting, "fault", None)
        data = b""
        while fault is not None and fault.name == "slow" and nbytes - len(data) > 20:
            await tasks.sleep(0.001)
            data += await receive(sock, 20, until)
        return data + await receive(sock, nbytes - len(data), until)

    greeting.send, greeting.receive, Connecting.run = bad_send, bad_receive, bad_run  # type: ignore[method-assign]
    try:
        yield
    finally:
        greeting.send, greeting.receive, Connecting.run = send, receive, run  # type: ignore[method-assign]


async def _spoil_hello(fault: Fault, sock: socket.socket, message: bytes) -> bool:
    """Returns whether the message is still to be sent."""
    if fault.name in BY_PROCESS and not fault.struck:
        fault.strike()
    if fault.name in (*BY_PROCESS, "slow"):
        return True
    if fault.name == "fragments":
        for byte in message:
            sock.send(bytes([byte]))
        return False
    if fault.name in ("junk", "oversized"):
        sock.send(PREFIX.pack(40 if fault.name == "junk" else 0xFFFFFFFF) + os.urandom(40))
        return False
    if fault.name == "truncated":
        sock.send(message[:30])
    if fault.name == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
    _starting.greeted.fail(Vanished())
    await tasks.sleep(60)
    return False


class _Sock:
    """The store's socket of a rank that sends byte by byte, or reads slowly."""

    def __init__(self, sock: socket.socket, fault: Fault) -> None:
        self._sock, self._fault = sock, fault
        self.settimeout, self.close = sock.settimeout, sock.close

    def sendall(self, data: bytes) -> None:
        for piece in (data[k : k + 1] for k in range(len(data))) if self._fault.name == "fragments" else [data]:
            self._sock.sendall(piece)

    def recv(self, nbytes: int) -> bytes:
        if self._fault.name == "slow":
            time.sleep(0.001)
        return self._sock.recv(min(nbytes, 20))


def misbehave_at_store(store: TcpStore, fault: Fault, until: threading.Event) -> None:
    """What a faulty rank does in the rendezvous. Returns when it is to go on.

    Raises:
        Vanished: the rank is gone. A rank that has sent nonsense stays connected until `until`.
    """
    store.check([])  # now it is connected, and the server believes it
    connection = store._idle[0]
    sock = connection.sock
    if fault.name in BY_PROCESS:
        fault.strike()
    elif fault.name in HARMLESS:
        connection.sock = _Sock(sock, fault)  # type: ignore[assignment]
    else:
        request = framed(pack([99, "set", "key", bytes(100)], MAX_MESSAGE_BYTES))
        if fault.name == "truncated":
            sock.sendall(request[:50])
        elif fault.name in ("junk", "oversized"):
            sock.sendall(PREFIX.pack(40 if fault.name == "junk" else 0xFFFFFFFF) + os.urandom(40))
            until.wait(30)
        elif fault.name == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        store.close()
        raise Vanished
