"""All messages of one rank that are under way: its message links, the receives that wait, and how all of it fails."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Mapping
from time import perf_counter

from hostring.arrays.dtypes import Array
from hostring.engine.causes import fresh_copy
from hostring.engine.control import Control
from hostring.engine.counters import Counters
from hostring.engine.matching import Matching, MessageWork
from hostring.engine.message_link import MessageLink
from hostring.engine.waits import Waiting
from hostring.errors import HostringError, PeerLostError
from hostring.transports.link import Link


class MessageTraffic:
    """Any thread may call; a lock guards what is under way.

    Attributes:
        cause: why no message moves any more, if so.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], control: Control, counters: Counters, epoch: int) -> None:
        self.rank = rank
        self.cause: HostringError | None = None
        self._control = control
        self._matching = Matching(links)
        self._links = {peer: MessageLink(peer, link, self._matching, counters, epoch) for peer, link in links.items()}
        self._mutex = threading.RLock()

    def link(self, rank: int) -> MessageLink:
        """The link to `rank`.

        Raises:
            HostringError: the first cause, once something has failed.
            ValueError: there is no such link.
        """
        if self.cause is not None:
            raise fresh_copy(self.cause)
        if rank not in self._links:
            raise ValueError(
                f"rank {self.rank} has no link to rank {rank}: this group only knows the addresses of its neighbours"
            )
        return self._links[rank]

    def send(self, link: MessageLink, work: MessageWork, data: Array) -> None:
        """Queue an array, and send what the link takes at once."""
        with self._mutex:
            link.queue(data, work)
            self._try(link, link.push)

    def post(self, work: MessageWork) -> None:
        """Serve a receive with a message that is already here, or let it wait for one."""
        with self._mutex:
            try:
                self._matching.post(work)
            except HostringError as exc:
                self.fail(exc)
                work.finish(error=exc)

    def move(self) -> bool:
        """Send and receive what is possible without waiting. Returns whether anything moved."""
        progress = False
        with self._mutex:
            for link in self._links.values():
                if link.lost is None:
                    progress |= self._try(link, link.move)
                elif link.outgoing or link.incoming or any(w.wanted == link.rank for w in self._matching.posted):
                    self.fail(link.lost)
        return progress

    def push(self) -> bool:
        """Send what is possible without waiting. Returns whether anything is left."""
        with self._mutex:
            for link in self._links.values():
                self._try(link, link.push)
            return any(link.outgoing for link in self._links.values())

    def _try(self, link: MessageLink, move: Callable[[], bool]) -> bool:
        """`move` something on `link`. A rank that is lost is a failure only once something is wanted of it."""
        try:
            return move()
        except PeerLostError as exc:
            link.lost = exc
            return True
        except HostringError as exc:
            self.fail(exc)
            return True

    def waiting(self) -> list[MessageWork]:
        """Posted receives without a message, and sends that the links have not taken."""
        with self._mutex:
            return [*self._matching.posted, *(w for link in self._links.values() for _, w in link.outgoing)]

    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._matching.posted or any(link.outgoing or link.incoming for link in self._links.values()))

    def overdue(self, seconds: float) -> bool:
        """Whether something has been under way for so long, or a message has come in part."""
        since = perf_counter() - seconds
        with self._mutex:
            return any(w.deadline - w.seconds < since for w in self.waiting()) or any(
                link.incoming for link in self._links.values()
            )

    def expire(self) -> None:
        """Fail when a deadline has passed."""
        now = perf_counter()
        late = next((w for w in self.waiting() if now > w.deadline), None)
        if late is not None:
            self._control.receiving = self._as_waiting(late)
            self.fail(self._control.timed_out(self._as_waiting(late), "did not take part", late.seconds))

    def arm(self, poller: select.poll) -> list[float]:
        """Let `poller` wake up for what comes, and tell other ranks whom this one waits for. Returns all deadlines."""
        with self._mutex:
            if self.cause is not None:  # the links may be closed
                return []
            waiting = self.waiting()
            for link in self._links.values():
                if link.lost is None:
                    link.register(poller)
            self._control.arm(poller)
            self._control.receiving = self._as_waiting(waiting[0]) if waiting else None
            return [w.deadline for w in waiting]

    def awake(self, events: list[tuple[int, int]]) -> None:
        """After a sleep: take what came on the control links."""
        try:
            self._control.hear(events)
        except HostringError as exc:
            self.fail(exc)
        self._control.receiving = None

    def _as_waiting(self, work: MessageWork) -> Waiting:
        return Waiting(min(self._links) if work.wanted is None else work.wanted, work.what)

    def fail(self, exc: HostringError) -> None:
        """End everything with the first cause behind `exc`, and tell everyone."""
        cause = self._control.settle(exc)
        self._control.flood(cause)
        self.end(cause)

    def end(self, cause: HostringError) -> None:
        """End everything that is under way with `cause`."""
        with self._mutex:
            self.cause = cause
            left = [*self.waiting(), *(link.incoming for link in self._links.values() if link.incoming)]
            self._matching.posted.clear()
            for link in self._links.values():
                link.outgoing.clear()
        for work in left:
            if not work.is_completed():
                work.finish(error=fresh_copy(cause))

    def abandon(self, cause: HostringError) -> None:
        """In a forked child: refuse every call. Locks may be held by threads that are not there."""
        self.cause = cause
        self._mutex = threading.RLock()
        self._matching.posted.clear()
