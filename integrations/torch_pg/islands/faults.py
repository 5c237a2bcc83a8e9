"""Failures in a group with islands: who is to blame, said in ranks of the whole group, on all ranks.

A call uses links inside an island and between islands. Their errors say little: gloo names no rank, and a lane knows
only one rank of each island. The control links of the whole group lead to all ranks. So a rank whose call fails looks
there for the cause, and tells it there. A thread looks there while this rank is in a call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import hostring
from hostring import HostringError, OperationTimeout, PeerLostError

LOOK_S = 0.05  # how often the thread looks for a failure while a call is under way
GRACE_S = 0.3  # how long a call may stand still after some rank has died: that rank may have done its part before
SETTLE_S = 1.0  # how long the first cause may take to arrive after something inside or between islands has broken


class Faults:
    """The failures of one group with islands.

    Args:
        comm: all ranks.
        abort: ends the calls that this rank is in, inside its island and between islands.
    """

    def __init__(self, comm: hostring.Comm, abort: Callable[[str], None]) -> None:
        self._comm, self._abort = comm, abort
        self._busy = threading.Event()
        self._call = 0  # the number of the call that is under way, or of the last one
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name=f"hostring-islands-{comm.rank}", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], Any]) -> Any:
        """Carry out `job`, which calls libraries inside and between islands. What it raises ends the whole group."""
        self._comm.session.check_alive()
        self._call += 1
        self._busy.set()
        try:
            return job()
        except BaseException as exc:
            raise self._judged(exc) from exc
        finally:
            self._busy.clear()

    def check(self) -> None:
        """Raise the cause, once the group has failed."""
        self._comm.session.check_alive()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._busy.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _judged(self, exc: BaseException) -> BaseException:
        """The first cause behind `exc`, which all ranks are told."""
        session = self._comm.session
        if not isinstance(exc, Exception):
            self._end(HostringError(f"rank {self._comm.rank} left a call by {type(exc).__name__}", self._comm.rank))
            return exc
        cause = self._late(exc) if isinstance(exc, OperationTimeout) else self._known(SETTLE_S)
        if cause is None:
            cause = exc if isinstance(exc, HostringError) else HostringError(
                f"rank {self._comm.rank}: the library inside its island failed: {exc}", self._comm.rank
            )  # fmt: skip
        self._end(cause)
        return session.known_failure() or cause

    def _late(self, exc: OperationTimeout) -> HostringError:
        """Who is late. A rank that waits inside its island looks absent to other islands, but answers here."""
        silent = self._comm.session.control.silent()
        known = self._comm.session.known_failure()
        if known is not None or not silent or exc.rank in silent:
            return known or exc
        return OperationTimeout(f"{exc}; rank {silent[0]} was not in this call", silent[0])

    def _known(self, seconds: float) -> HostringError | None:
        """What the whole group's control links say within `seconds`."""
        give_up = time.monotonic() + seconds
        while (cause := self._comm.session.known_failure()) is None and time.monotonic() < give_up:
            time.sleep(LOOK_S / 5)
        return cause

    def _end(self, cause: HostringError) -> None:
        """Tell all ranks, and end the calls that this rank is in."""
        with self._lock:
            if self._closed:
                return
            self._comm.session.fail(cause)
            self._abort(str(cause))

    def _watch(self) -> None:
        call, stands_since = 0, 0.0
        while not self._closed:
            self._busy.wait()
            time.sleep(LOOK_S)
            if not self._busy.is_set() or self._closed:
                continue
            if self._call != call:
                call, stands_since = self._call, time.monotonic()
            cause = self._comm.session.known_failure()
            passed_on = cause is not None and self._comm.session.control.cause is not None
            if cause is not None and (passed_on or time.monotonic() - stands_since > GRACE_S):
                self._end(cause)
                return


def in_whole_group(exc: HostringError, ranks: Mapping[int, int], where: str) -> HostringError:
    """`exc` of a part of the group, with its culprit's rank in the whole group.

    Args:
        ranks: ranks of the whole group by their rank in the part.
        where: the part, for the message.
    """
    if exc.rank is None:
        return type(exc)(f"{exc} ({where})") if not isinstance(exc, PeerLostError) else exc
    culprit = ranks[exc.rank]
    if isinstance(exc, PeerLostError):
        return PeerLostError(culprit, f"{exc.reason} ({where})")
    numbers = ", ".join(f"{theirs} is rank {ours}" for theirs, ours in ranks.items())
    return type(exc)(f"{exc} ({where}, in whose numbers {numbers})", culprit)
