"""Ranks that misbehave at a given byte: what a faulty process, network or stranger does to the links of a group.

Faults strike by position, not by time, so a slow machine changes nothing. The data links of a faulty rank are wrapped
(`FaultyLink`), it says its hello inside `bad_hello`, and begins with `misbehave_at_store` in the rendezvous.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hostring.comm import Comm
from hostring.engine.frames import HEADER_BYTES, MAGIC
from hostring.group import greeting, tasks
from hostring.group.config import from_environment
from hostring.group.connecting import Connecting
from hostring.group.contract import contract, neighbours
from hostring.group.group import connect
from hostring.store.client import MAX_MESSAGE_BYTES, TcpStore
from hostring.store.protocol import PREFIX, framed, pack
from hostring.transports.link import Link
from hostring.tuning.agreement import open_session

FATAL = ("kill", "stop", "close", "blackhole", "reset", "truncated", "junk", "oversized")
HARMLESS = ("fragments", "slow")
BY_PROCESS = ("kill", "stop", "blackhole", "dead host")
TOPOLOGIES = ("mesh", "ring", "star", "tree")
VARIANTS = {"mesh": "two_shot", "ring": "chain", "star": "stream", "tree": "reduce_broadcast"}
CULPRITS = {  # hub and leaf of the star, root and inner rank of the tree
    3: {"mesh": 1, "ring": 2, "star": 0, "tree": 1},
    4: {"mesh": 2, "ring": 1, "star": 3, "tree": 2},
}
_LINGER_NOT = struct.pack("ii", 1, 0)


class Vanished(Exception):
    """Ends the thread of a rank whose process would be gone by now."""


@dataclass
class Fault:
    """What happens to one rank, and at which byte of its data links.

    Attributes:
        at: the fault strikes at the first call on a data link after this many bytes went either way; None for never.
        blackhole: what cuts this rank's network.
    """

    name: str
    at: int | None = None
    blackhole: Callable[[], None] = lambda: None
    links: list[Link] = field(default_factory=list)
    moved: int = 0
    due: bool = False
    struck: bool = False

    def step(self) -> None:
        """Before each call on a data link."""
        if self.at is None or self.struck or self.moved < self.at:
            return
        if self.name in ("truncated", "junk", "oversized"):  # these need a frame to spoil
            self.due = True
        elif self.name in (*FATAL, "dead host"):
            self.strike()

    def strike(self) -> None:
        """Now."""
        self.struck = True
        if self.name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.name == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.name in ("blackhole", "dead host"):
            self.blackhole()
        else:
            vanish(self.links, reset=self.name == "reset")
            raise Vanished


def vanish(links: Sequence[Any], reset: bool = False) -> None:
    """End links as the death of their process does: no goodbye; with a reset when input was left unread."""
    socks = [link.sock if isinstance(link, FaultyLink) else link._sock for link in links]
    for sock in socks:
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        else:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
    for sock in socks:
        sock.close()


class FaultyLink:
    """A link of a rank that has `fault`."""

    def __init__(self, link: Any, fault: Fault) -> None:
        self._link, self._fault = link, fault
        self.peer, self.fileno, self.arm, self.close, self.abort = (
            link.peer,
            link.fileno,
            link.arm,
            link.close,
            link.abort,
        )
        self.sock = link._sock
        self._next_read = 0.0

    def send(self, buffers: Sequence[Any]) -> int:
        fault = self._fault
        fault.step()
        views = [memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes]
        if fault.due and not fault.struck and views and len(views[0]) == HEADER_BYTES and views[0][:4] == MAGIC:
            return self._spoil(views)
        if fault.name == "fragments":
            views = [views[0][:1]] if views else []
        n: int = self._link.send(views)
        fault.moved += n
        return n

    def recv_into(self, view: Any) -> int:
        return self._read(memoryview(view).cast("B"))

    def recv_into_all(self, views: Sequence[Any]) -> int:
        return self._read(
            next((flat for v in views if memoryview(v).nbytes and (flat := memoryview(v).cast("B"))), memoryview(b""))
        )

    def _read(self, view: memoryview) -> int:
        fault = self._fault
        fault.step()
        if fault.name == "fragments":
            view = view[:1]
        if fault.name == "slow":
            if time.perf_counter() < self._next_read:
                return 0
            self._next_read = time.perf_counter() + 0.001
            view = view[:700]
        n: int = self._link.recv_into(view)
        fault.moved += n
        return n

    def _spoil(self, views: list[memoryview]) -> int:
        fault = self._fault
        fault.struck = True
        total = sum(len(v) for v in views)
        if fault.name == "truncated":
            self._link.send([b"".join(views)[: min(total - 1, HEADER_BYTES + 20)]])
            vanish(fault.links)
            raise Vanished
        header = (
            random.Random(7).randbytes(HEADER_BYTES)
            if fault.name == "junk"
            else bytes(views[0][:-8]) + struct.pack("<Q", 1 << 40)
        )
        self._link.send([header, *views[1:]])
        return total


def join(
    rank: int, world_size: int, topology: str, timeout: float, store: Any, fault: Fault | None = None,
    hosts_spec: str | None = None, transport: str = "tcp",
) -> Comm:  # fmt: skip
    """`hostring.init` over TCP, with the links of a faulty rank wrapped."""
    order = "tree" if topology == "tree" else "rank"
    environ = {} if hosts_spec is None else {"HOSTRING_INTERFACE": hosts_spec}
    config = from_environment(
        rank,
        world_size,
        topology=topology,
        order=order,
        transport=transport,
        timeout=timeout,
        store=store,
        environ=environ,
    )
    group = connect(config, neighbours=neighbours(topology, order), contract=contract(topology, order))
    if fault is not None:
        fault.links = group.links
        group.data = {peer: FaultyLink(link, fault) for peer, link in group.data.items()}
    return Comm(open_session(group, topology, order, "float32", timeout))


# ------------------------------------------------------------------ the hello

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
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    _starting.greeted.fail(Vanished())
    await tasks.sleep(60)
    return False


# ------------------------------------------------------------------ the rendezvous


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
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        store.close()
        raise Vanished
