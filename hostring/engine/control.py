"""The control links: who failed first, and who waits for whom. Small frames that interrupt any sleep."""

from __future__ import annotations

import select
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import msgpack

from hostring import errors
from hostring.engine.frames import Call
from hostring.errors import (
    CollectiveMismatch,
    GroupClosedError,
    HostringError,
    OperationTimeout,
    PeerLostError,
    ProtocolError,
)
from hostring.store.protocol import unpack
from hostring.transports.link import Link

_PREFIX: Final = struct.Struct("<4sI")
_MAGIC: Final = b"hCtl"
_MAX_NBYTES: Final = 1 << 16
PROBE_SECONDS: Final = 0.4  # how long an awake rank may take to say whom it waits for
GRACE_SECONDS: Final = 0.3  # how long an operation may stand still after some rank has died
SETTLE_SECONDS: Final = 0.5  # how long a first cause may take to arrive after a link has broken


@dataclass
class _Peer:
    link: Link
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    gone: str | None = None  # why nothing more will come
    farewell: bool = False  # it closed the group in an orderly way


@dataclass(frozen=True)
class Waiting:
    """What a rank sleeps in: an operation named `what`, waiting for `peer`; `call` number `seq` when it is a collective."""

    peer: int
    what: str
    call: Call | None = None
    seq: int = -1

    def words(self) -> str:
        """What all ranks must say alike for this number."""
        return "" if self.call is None else self.call.describe(self.seq)


class Control:
    """All control links of this rank. A thread in a collective and one that receives messages may both be in here.

    Attributes:
        cause: the first failure that this rank knows of; everything after it raises the same.
        waiting: what this rank sleeps in, for whoever asks; None while it is awake.
        receiving: the same for messages.
    """

    def __init__(self, rank: int, links: Mapping[int, Link]) -> None:
        self._rank = rank
        self._peers = {peer: _Peer(link) for peer, link in links.items()}
        self._by_fd = {link.fileno(): peer for peer, link in links.items()}
        self._states: dict[
            int, tuple[int, int, str]
        ] = {}  # of those that answered: whom they wait for, call number, words
        self._asked: set[int] = set()
        self._reading, self._telling = threading.Lock(), threading.Lock()
        self.cause: HostringError | None = None
        self.waiting: Waiting | None = None
        self.receiving: Waiting | None = None

    def register(self, poller: select.poll) -> None:
        """Let `poller` wake up for what comes here."""
        for fd, peer in self._by_fd.items():
            if self._peers[peer].gone is None:
                poller.register(fd, self._peers[peer].link.arm(True, False))

    def hear(self, events: list[tuple[int, int]]) -> None:
        """Read what came on the control links among `events`, the result of a `poll`.

        A rank that is gone may have done its part before: it is an error only for an operation that then stands still.

        Raises:
            HostringError: the first cause, when a peer passed one on; `PeerLostError` when nothing came and a rank has died;
                `CollectiveMismatch` when a peer that was asked sleeps in another call of the same number.
        """
        woken = self._peers if not events else [self._by_fd[fd] for fd, _ in events if fd in self._by_fd]
        for peer in (
            woken
        ):  # after a sleep without events, all: a link that rings when it is armed may have got something before
            if self._peers[peer].gone is None:
                self._read(peer)
        if self.cause is not None:
            raise again(self.cause)
        if self._states and self.waiting is not None:
            self._compare(self.waiting)
        if not events:
            for peer, state in self._peers.items():
                if state.gone is not None and not state.farewell:
                    raise PeerLostError(peer, state.gone)

    def ask(self, peer: int) -> None:
        """Ask `peer` what it sleeps in: two ranks that each wait for the other's first message would wait for ever."""
        if peer in self._peers and peer not in self._asked and self._peers[peer].gone is None:
            self._asked.add(peer)
            self._tell(peer, {"what": "probe"})

    def _compare(self, mine: Waiting) -> None:
        for peer, (_, seq, theirs) in self._states.items():
            if seq == mine.seq and theirs and theirs != mine.words():
                raise CollectiveMismatch(
                    f"this rank calls {mine.words()}; rank {peer} calls {theirs}; each waits for the other", peer
                )

    def alive(self) -> int:
        """How many other ranks have not gone, as far as this one can see now."""
        self._listen(0)
        return sum(p.gone is None and not p.farewell for p in self._peers.values())

    def patience(self) -> float:
        """Seconds to sleep at most before `hear` should judge: short when a rank has died."""
        return GRACE_SECONDS if any(p.gone is not None and not p.farewell for p in self._peers.values()) else 1.0

    def _read(self, peer: int) -> None:
        state = self._peers[peer]
        chunk = bytearray(4096)
        with self._reading:
            try:
                while n := state.link.recv_into(chunk):
                    state.received += chunk[:n]
                    self._frames(peer, state)
            except PeerLostError as exc:
                state.gone = exc.reason

    def _frames(self, peer: int, state: _Peer) -> None:
        while len(state.received) >= _PREFIX.size:
            magic, nbytes = _PREFIX.unpack_from(state.received)
            if magic != _MAGIC or nbytes > _MAX_NBYTES:
                self._nonsense(peer, state)
                return
            if len(state.received) < _PREFIX.size + nbytes:
                return
            frame = bytes(state.received[_PREFIX.size : _PREFIX.size + nbytes])
            del state.received[: _PREFIX.size + nbytes]
            try:
                self._obey(peer, state, unpack(frame))
            except (
                ValueError,
                TypeError,
                AttributeError,
                KeyError,
                OverflowError,
            ):  # whatever a frame holds that none should
                self._nonsense(peer, state)
                return

    def _nonsense(self, peer: int, state: _Peer) -> None:
        self.cause = self.cause or ProtocolError(
            f"rank {peer} sent bytes on its control link that are no control frame", peer
        )
        state.received.clear()
        state.gone = "it sent nonsense on its control link"

    def _obey(self, peer: int, state: _Peer, body: dict[str, Any]) -> None:
        what = body.get("what")
        if what == "abort":
            self.cause = self.cause or _from_words(body, peer)
        elif what == "probe":
            mine = self.waiting or self.receiving or Waiting(-1, "")
            self._tell(peer, {"what": "state", "waits_for": mine.peer, "seq": mine.seq, "words": mine.words()})
        elif what == "state":
            self._states[peer] = (int(body["waits_for"]), int(body["seq"]), str(body["words"]))
            self._asked.discard(peer)
        elif what == "farewell":
            state.farewell = True

    def _tell(self, peer: int, body: dict[str, Any]) -> None:
        packed = msgpack.packb(body)
        state = self._peers[peer]
        with self._telling:
            if len(state.unsent) > _MAX_NBYTES:  # it has not read for very long; what is in its pipe must stay whole
                return
            state.unsent += _PREFIX.pack(_MAGIC, len(packed)) + packed
            try:
                taken = state.link.send((bytes(state.unsent),))
                del state.unsent[:taken]
            except PeerLostError as exc:
                state.gone = state.gone or exc.reason

    def flood(self, cause: HostringError) -> None:
        """Tell everyone the first cause. Never waits."""
        self.cause = cause
        words = _to_words(cause)
        for peer in self._peers:
            self._tell(peer, words)

    def farewell(self) -> None:
        """Tell everyone that this rank leaves in an orderly way."""
        for peer in self._peers:
            self._tell(peer, {"what": "farewell"})

    def settle(self, failure: HostringError) -> HostringError:
        """The first cause behind `failure`: what a peer passes on within a moment, else `failure` itself.

        A peer that gives up closes its links after it has said why, so a broken link alone is no proof of death.
        """
        suspect = failure.rank if isinstance(failure, PeerLostError) else None
        give_up = perf_counter() + SETTLE_SECONDS
        while (
            self.cause is None and suspect is not None and suspect in self._peers and self._peers[suspect].gone is None
        ):
            if not self._listen(give_up - perf_counter()):
                break
        self._listen(0)
        return self.cause or failure

    def _listen(self, seconds: float) -> bool:
        """Hear what comes within `seconds`. Returns whether the time was not yet over."""
        if seconds < 0:
            return False
        poller = select.poll()
        self.register(poller)
        for fd, _ in poller.poll(seconds * 1000):
            peer = self._by_fd.get(fd)
            if peer is not None:
                self._read(peer)
        return True

    def culprit(self, waits_for: int) -> int:
        """Follow who waits for whom, from `waits_for` on, to the rank that keeps everybody waiting.

        A rank that is asleep in a call answers whom it waits for; a stopped one, or one that computes elsewhere, doesn't.
        """
        seen = {self._rank}
        while waits_for in self._peers and waits_for not in seen and self._peers[waits_for].gone is None:
            seen.add(waits_for)
            self._states.pop(waits_for, None)
            self._tell(waits_for, {"what": "probe"})
            give_up = perf_counter() + PROBE_SECONDS
            while waits_for not in self._states and self.cause is None and self._listen(give_up - perf_counter()):
                pass
            if waits_for not in self._states or self._states[waits_for][0] < 0 or self._states[waits_for][0] in seen:
                break
            waits_for = self._states[waits_for][0]
        return waits_for

    def timed_out(self, mine: Waiting, progress: str, seconds: float) -> HostringError:
        """The error for a deadline that passed in `mine`; or the first cause, when one comes in."""
        culprit = self.culprit(mine.peer)
        if self.cause is not None:
            return again(self.cause)
        behind = "" if culprit == mine.peer else f" (rank {mine.peer} itself waits for rank {culprit})"
        what = f"{mine.what}: rank {mine.peer} {progress} in {seconds:.1f} s{behind}"
        return OperationTimeout(f"{what}; raise the timeout if rank {culprit} is only slow", culprit)

    def close(self) -> None:
        for state in self._peers.values():
            state.link.close()

    def abort(self) -> None:
        for state in self._peers.values():
            state.link.abort()


def _to_words(cause: HostringError) -> dict[str, Any]:
    kind = type(cause).__name__ if type(cause).__module__ == errors.__name__ else "HostringError"
    return {
        "what": "abort",
        "kind": kind,
        "message": getattr(cause, "reason", str(cause))[:4000],
        "rank": -1 if cause.rank is None else cause.rank,
    }


def _from_words(body: dict[str, Any], peer: int) -> HostringError:
    named = getattr(errors, str(body.get("kind")), None)
    kind = (
        named
        if isinstance(named, type) and issubclass(named, HostringError) and named is not GroupClosedError
        else HostringError
    )
    rank = None if body.get("rank", -1) < 0 else int(body["rank"])
    message = str(body.get("message"))
    if "(reported by rank" not in message and rank != peer:
        message += f" (reported by rank {peer})"
    if kind is PeerLostError:
        return HostringError(message) if rank is None else PeerLostError(rank, message)
    return kind(message, rank)


def again(cause: HostringError) -> HostringError:
    """A fresh exception with the words of `cause`, so that tracebacks don't pile up on one object."""
    fresh = (
        PeerLostError(cause.rank, cause.reason)
        if isinstance(cause, PeerLostError) and cause.rank is not None
        else type(cause)(str(cause), cause.rank)
    )
    fresh.__cause__ = cause
    return fresh
