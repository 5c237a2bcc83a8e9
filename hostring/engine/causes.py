"""The first cause of a failure: how it is passed from rank to rank, and raised more than once."""

from __future__ import annotations

from typing import Any

from hostring import errors
from hostring.errors import GroupClosedError, HostringError, PeerLostError


def to_words(cause: HostringError) -> dict[str, Any]:
    """The fields of an abort frame."""
    kind = type(cause).__name__ if type(cause).__module__ == errors.__name__ else "HostringError"
    return {
        "what": "abort",
        "kind": kind,
        "message": getattr(cause, "reason", str(cause))[:4000],
        "rank": -1 if cause.rank is None else cause.rank,
    }


def from_words(body: dict[str, Any], peer: int) -> HostringError:
    """The exception behind an abort frame that came from rank `peer`."""
    named = getattr(errors, str(body.get("kind")), None)
    known = isinstance(named, type) and issubclass(named, HostringError) and named is not GroupClosedError
    kind: type[HostringError] = named if known and named is not None else HostringError
    rank = None if body.get("rank", -1) < 0 else int(body["rank"])
    message = str(body.get("message"))
    if "(reported by rank" not in message and rank != peer:
        message += f" (reported by rank {peer})"
    if kind is PeerLostError:
        return HostringError(message) if rank is None else PeerLostError(rank, message)
    return kind(message, rank)


def fresh_copy(cause: HostringError) -> HostringError:
    """A new exception with the words of `cause`: one object that is raised often would collect tracebacks."""
    fresh = (
        PeerLostError(cause.rank, cause.reason)
        if isinstance(cause, PeerLostError) and cause.rank is not None
        else type(cause)(str(cause), cause.rank)
    )
    fresh.__cause__ = cause
    return fresh
