"""All exceptions.

Misuse of the API is a `ValueError` or `TypeError` raised before a byte moves; what happens on the wire is a
`HostringError`.
"""

from __future__ import annotations


class HostringError(RuntimeError):
    """Something went wrong between the ranks. The group is poisoned: later calls raise the same cause.

    `rank` is the culprit: the rank that died, was waited for, or called something else. None when there is none.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLostError(HostringError, ConnectionError):
    """Rank `rank` died, closed its links or became unreachable, for `reason`."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason}", rank)
        self.reason = reason


class OperationTimeout(HostringError, TimeoutError):
    """A deadline passed while `rank` was waited for."""


class CollectiveMismatch(HostringError, ConnectionError):
    """Two ranks called different things. The message describes both sides.

    `rank` is the one whose call differs from that of most ranks; the other side where there is no such one.
    """


class ProtocolError(HostringError, ConnectionError):
    """Bytes arrived that are not hostring's. `rank` is the peer on that link."""


class HandshakeError(HostringError, ConnectionError):
    """A peer was refused, or refused us: wrong secret, version, group or contract."""


class RendezvousError(HostringError, ConnectionError):
    """The ranks could not find each other in time. The message names who is missing; `rank` is the first of them."""


class GroupClosedError(HostringError):
    """This rank closed or aborted the group before the call."""
