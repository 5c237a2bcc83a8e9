"""A link on which given bytes come in, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostring.errors import PeerLostError


class Feed:
    """Gives `data` to whoever reads, then says that the peer is gone. Keeps what is sent, up to `room` bytes."""

    peer = 1

    def __init__(self, data: bytes = b"", room: int = 1 << 30) -> None:
        self.sent = bytearray()
        self._left, self.room = memoryview(data), room

    def send(self, buffers: Sequence[Any]) -> int:
        taken = b"".join(memoryview(b).cast("B") for b in buffers)[: self.room - len(self.sent)]
        self.sent += taken
        return len(taken)

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
