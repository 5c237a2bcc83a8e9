"""All exceptions. Misuse of the API is a `ValueError` or `TypeError` raised before a byte moves; what happens on the wire is a `HostringError`."""

from __future__ import annotations


class HostringError(RuntimeError):
    """Something went wrong between the ranks. The group is poisoned: later calls raise the same cause."""


class PeerLostError(HostringError, ConnectionError):
    """A rank died, closed its links or became unreachable. `rank` is the one that was lost."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason}")
        self.rank = rank


class OperationTimeout(HostringError, TimeoutError):
    """A deadline passed. `rank` is the one that was waited for, when there is one."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CollectiveMismatch(HostringError, ConnectionError):
    """Two ranks called different things. The message describes both sides. `rank` is the other side."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class ProtocolError(HostringError, ConnectionError):
    """Bytes arrived that are not hostring's. `rank` is the peer on that link."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class HandshakeError(HostringError, ConnectionError):
    """A peer was refused, or refused us: wrong secret, version, group or contract."""


class RendezvousError(HostringError, ConnectionError):
    """The ranks could not find each other in time. The message names who is missing."""


class GroupClosedError(HostringError):
    """The group was closed or aborted by this rank before the call."""
