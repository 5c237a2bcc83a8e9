"""From a group that lost a rank to one that is whole again."""

from __future__ import annotations

import errno
import os
from time import monotonic

from hostring import (
    CollectiveMismatch,
    Comm,
    GroupClosedError,
    HandshakeError,
    HostringError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
)
from hostring.integrations.llm.request import HEAD_RANK
from hostring.launch.silence import is_silence

_NOT_RECOVERABLE = (CollectiveMismatch, GroupClosedError, HandshakeError, ProtocolError)


_NO_ANSWER = [os.strerror(number) for number in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)]


def recoverable(exc: HostringError) -> bool:
    """A rank was lost that may come back: any but the head, which comes back only from behind a cut cable."""
    if exc.rank is None or isinstance(exc, _NOT_RECOVERABLE):
        return False
    why = reason(exc)
    return exc.rank != HEAD_RANK or is_silence(why) or any(words in why for words in _NO_ANSWER)


def regrouped(comm: Comm, lost: HostringError, patience: float) -> Comm:
    """`comm` with all its ranks again, at their places. A rank that dies while the links are made costs another
    attempt.

    Args:
        lost: why that is needed.
        patience: seconds to wait for ranks that come back.

    Raises:
        HostringError: too few ranks came in time, or there is no store, or this rank got another place.
    """
    ranks, deadline = comm.world_size, monotonic() + patience
    while True:
        try:
            rebuilt = comm.rebuild(min_ranks=ranks, timeout=max(0.1, deadline - monotonic()))
            break
        except RendezvousError:
            if monotonic() > deadline:
                raise
        except ValueError as cant:  # there is no store
            raise HostringError(f"{lost}; {cant}", lost.rank) from lost
    if rebuilt.world_size == ranks and (rebuilt.rank == HEAD_RANK) == (comm.rank == HEAD_RANK):
        return rebuilt
    who = f"{rebuilt.world_size} ranks came together, this as rank {rebuilt.rank}"
    rebuilt.close()
    raise HostringError(f"{who}; {ranks} are wanted, and this was rank {comm.rank}: was one started twice?")


def reason(exc: HostringError) -> str:
    """What happened, without the words that say to whom."""
    return exc.reason if isinstance(exc, PeerLostError) else str(exc)
