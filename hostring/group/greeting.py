"""The hello over a socket, and the sockets that are through with it: what dialling and accepting have in common."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from hostring.group.handshake import MAX_HELLO_BYTES, Hello, Protocol
from hostring.group.tasks import readable, writable
from hostring.store.protocol import PREFIX, checked_nbytes, framed
from hostring.transports.link import LinkKey

HELLO_S = 5.0  # for all that one side of a hello has to say


@dataclass
class Greeted:
    """The links that one rank needs, and what has come of them so far.

    Attributes:
        hello: this rank's. Each link's says which kind of link it is for.
        secret: proved in the hellos.
        missing: the links that are not there yet.
        sockets, hellos: of those that are there, and what their peers said.
        sessions: the start that each peer's first link named. A link of another start of it is refused.
        reasons: why the last attempt to dial a peer failed.
        failure: ends all attempts.
    """

    hello: Hello
    secret: bytes
    missing: set[LinkKey]
    sockets: dict[LinkKey, socket.socket] = field(default_factory=dict)
    hellos: dict[int, Hello] = field(default_factory=dict)
    sessions: dict[int, bytes] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    failure: Exception | None = None

    def keep(self, sock: socket.socket, theirs: Hello) -> None:
        """`sock` is through, and becomes the link that `theirs` names."""
        self.sockets[theirs.rank, theirs.kind] = sock
        self.hellos[theirs.rank] = theirs
        self.sessions[theirs.rank] = theirs.session
        self.missing.discard((theirs.rank, theirs.kind))

    def fail(self, exc: Exception) -> None:
        """End all attempts with `exc`, unless something else did before."""
        self.failure = self.failure or exc

    def tried(self, peers: Collection[int]) -> list[str]:
        """Why `peers` could not be dialled, as far as this rank dials them."""
        return [f"rank {peer}: {self.reasons[peer]}" for peer in sorted(peers) if peer in self.reasons]


async def converse(protocol: Protocol, sock: socket.socket) -> tuple[Hello, bytes]:
    """Let `protocol` say its hello over `sock`, within `HELLO_S`. Returns what it returns."""
    until = time.monotonic() + HELLO_S
    try:
        out = next(protocol)
        while True:
            if out:
                await send(sock, framed(out), until)
            length = await receive(sock, PREFIX.size, until)
            out = protocol.send(await receive(sock, checked_nbytes(length, MAX_HELLO_BYTES), until))
    except StopIteration as stop:  # can't leave a coroutine by itself
        result: tuple[Hello, bytes] = stop.value
        return result


async def send(sock: socket.socket, data: bytes, until: float) -> None:
    """Send all of `data`.

    Raises:
        TimeoutError: not by `until`.
    """
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            await writable(sock, until)


async def receive(sock: socket.socket, nbytes: int, until: float) -> bytes:
    """Exactly `nbytes`, so that what follows on the link stays there.

    Raises:
        EOFError: the other end closed.
        TimeoutError: they did not come by `until`.
    """
    data = b""
    while len(data) < nbytes:
        try:
            more = sock.recv(nbytes - len(data))
        except BlockingIOError:
            await readable(sock, until)
            continue
        if not more:
            raise EOFError("closed in the middle of a message" if data else "closed")
        data += more
    return data


def say_at_once(sock: socket.socket, message: bytes) -> None:
    """Send the last message of a hello: some tens of bytes, for which a fresh socket has room.

    Raises:
        OSError: it has not.
    """
    data = framed(message)
    if sock.send(data) != len(data):
        raise OSError("the socket did not take the last message of the hello")
