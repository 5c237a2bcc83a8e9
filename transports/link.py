"""What a transport provides: a link, an ordered, reliable, full-duplex byte stream to one peer.

A link never waits. The engine waits, on all links of a round together, by polling `fileno()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

Buffer: TypeAlias = Any
"""Contiguous memory: bytes, bytearray, memoryview or numpy array. Before Python 3.12 typing has no name for it."""


LinkKey = tuple[int, str]
"""(peer, kind) of a link."""


class Link(Protocol):
    """One end of a byte stream to rank `peer`. After an error it is dead and is never reused."""

    @property
    def peer(self) -> int:
        """The rank at the other end."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Gather and send without waiting. Returns the number of bytes taken, 0 when the pipe is full.

        What was not taken must be offered again next, before anything else: a link may have begun with it.

        Raises:
            PeerLostError: the peer is gone.
        """

    def recv_into(self, view: Buffer) -> int:
        """Read what is there, without waiting. Returns the number of bytes, 0 when nothing is there yet.

        Raises:
            PeerLostError: the peer is gone, or closed in an orderly way: for a collective that is a failure too.
        """

    def recv_into_all(self, views: Sequence[Buffer]) -> int:
        """Like `recv_into`, filling several buffers one after the other."""

    def fileno(self) -> int:
        """A descriptor for `poll`. Readiness is a hint: a call may still return 0."""

    def arm(self, recv: bool, send: bool) -> int:
        """Prepare for sleeping in `poll`, and return the poll event mask to wait for.

        A transport that works through memory sets its doorbell here. The caller tries once more between
        `arm` and `poll`, so that a byte that came in between is not slept through.
        """

    def close(self) -> None:
        """Deliver what was sent, then close. Never waits longer than a moment. Idempotent."""

    def abort(self) -> None:
        """Close now; what was not delivered is lost. Idempotent. May be called from any thread."""
