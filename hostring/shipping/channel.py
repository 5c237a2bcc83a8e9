"""A connection between a rank and the head. Both prove that they know the group's secret; no message can be changed."""

from __future__ import annotations

import os
import socket
from typing import Any, Literal

from hostring.errors import HandshakeError
from hostring.store.protocol import PREFIX, checked_nbytes, framed, pack, prove, proves, typed, unpack

MAX_HELLO_NBYTES = 256
MAX_MESSAGE_NBYTES = 1 << 20
_PROOF_NBYTES = 32
_GREETING = "ship 1"

Role = Literal["head", "rank"]


class Channel:
    """Messages that carry a proof, in order. What follows a message as a body is covered by a hash in that message."""

    def __init__(self, sock: socket.socket, key: bytes, role: Role) -> None:
        self._sock, self._key = sock, key
        self._role: Role = role
        self._other: Role = "rank" if role == "head" else "head"
        self._sent = self._received = 0

    def send(self, value: Any, body: bytes = b"") -> None:
        """Send a message, and bytes behind it."""
        data = pack(value, MAX_MESSAGE_NBYTES)
        proof = prove(self._key, self._role, self._sent.to_bytes(8, "little"), data)
        self._sent += 1
        self._sock.sendall(framed(data) + proof)
        if body:
            self._sock.sendall(body)

    def receive(self) -> Any:
        """The next message.

        Raises:
            HandshakeError: it is not what the other end sent.
        """
        data = receive_framed(self._sock, MAX_MESSAGE_NBYTES)
        proof = receive_exactly(self._sock, _PROOF_NBYTES)
        if not proves(proof, self._key, self._other, self._received.to_bytes(8, "little"), data):
            raise HandshakeError("a message about the model's files was changed on its way")
        self._received += 1
        return unpack(data)

    def receive_body(self, nbytes: int) -> bytes:
        """Bytes behind a message."""
        return receive_exactly(self._sock, nbytes)

    def close(self) -> None:
        self._sock.close()


def answer(sock: socket.socket, secret: bytes) -> Channel:
    """The head's end of a new connection.

    Raises:
        HandshakeError: a stranger.
    """
    greeting = pack({"hostring": _GREETING, "nonce": os.urandom(16)}, MAX_HELLO_NBYTES)
    sock.sendall(framed(greeting))
    hello = unpack(receive_framed(sock, MAX_HELLO_NBYTES))
    nonce, proof = typed(hello, 0, bytes), typed(hello, 1, bytes)
    if not proves(proof, secret, "ship rank", greeting, nonce):
        raise HandshakeError("a stranger asked for the model's files")
    sock.sendall(framed(pack([prove(secret, "ship head", greeting, nonce)], MAX_HELLO_NBYTES)))
    return Channel(sock, prove(secret, "ship key", greeting, nonce), "head")


def dial(sock: socket.socket, secret: bytes) -> Channel:
    """The other end.

    Raises:
        HandshakeError: something else answers there, or it does not know the secret.
    """
    greeting = receive_framed(sock, MAX_HELLO_NBYTES)
    if unpack(greeting).get("hostring") != _GREETING:
        raise HandshakeError(f"something else answers there: {greeting[:40]!r}")
    nonce = os.urandom(16)
    sock.sendall(framed(pack([nonce, prove(secret, "ship rank", greeting, nonce)], MAX_HELLO_NBYTES)))
    verdict = unpack(receive_framed(sock, MAX_HELLO_NBYTES))
    if not proves(typed(verdict, 0, bytes), secret, "ship head", greeting, nonce):
        raise HandshakeError("the machine that has the model does not know the group's secret")
    return Channel(sock, prove(secret, "ship key", greeting, nonce), "rank")


def receive_framed(sock: socket.socket, limit: int) -> bytes:
    """A message with its length in front."""
    return receive_exactly(sock, checked_nbytes(receive_exactly(sock, PREFIX.size), limit))


def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """So many bytes.

    Raises:
        ConnectionResetError: the connection ended before.
    """
    data = bytearray(nbytes)
    view, at = memoryview(data), 0
    while at < nbytes:
        n = sock.recv_into(view[at:])
        if n == 0:
            raise ConnectionResetError("the connection was closed")
        at += n
    return bytes(data)
