"""Who drives the message links, and until when: whoever waits, else a background thread.

Whoever waits makes progress for everybody: it sends what is queued and receives what comes, so two ranks that both send
first don't block each other. Operations that nobody waits for are driven by a background thread, which looks for such
once in a millisecond: most are waited for at once, and handing progress from thread to thread takes longer than a message.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final

from hostring.engine.control import Control, Waiting, again
from hostring.engine.counters import Counters
from hostring.engine.matching import Matching, MessageWork
from hostring.engine.message_link import MessageLink
from hostring.engine.work import TICK, Work
from hostring.errors import HostringError, PeerLostError
from hostring.transports.link import Link

_SPINS: Final = 200
_QUIET_TICKS: Final = 200  # the background thread ends after so many with nothing to do


class MessageProgress:
    """The message links of one rank, and what keeps them going. The `Driver` of its works."""

    def __init__(self, rank: int, links: Mapping[int, Link], control: Control, counters: Counters, epoch: int) -> None:
        self._rank, self._control = rank, control
        self._matching = Matching(links)
        self._links = {peer: MessageLink(peer, link, self._matching, counters, epoch) for peer, link in links.items()}
        self._cause: HostringError | None = None
        self._mutex = threading.RLock()  # of all that is under way
        self._driver = threading.Lock()  # held by the thread that drives
        self._changed = threading.Condition()
        self._takers = 0  # threads that wait for the background thread to let them drive
        self._wake: tuple[int, int] | None = None
        self._sleeping = False
        self._thread: threading.Thread | None = None

    def help(self, work: Work) -> None:
        """See `Driver.help`."""
        waiting = False
        while not work.is_completed():
            if self._driver.acquire(blocking=False):
                try:
                    self._drive(work.is_completed, work.deadline if isinstance(work, MessageWork) else None)
                finally:
                    self._driver.release()
                    self._notify(work)
            elif not waiting:
                waiting = True
                work.add_done_callback(self._notify)
            else:
                self._take_over(work)

    def _take_over(self, work: Work) -> None:
        """Wait until `work` has ended or its driver leaves; the background thread leaves when asked, others at their own end."""
        with self._changed:
            self._takers += 1
        self._nudge(False)
        with self._changed:
            self._changed.wait_for(lambda: work.is_completed() or not self._driver.locked(), timeout=0.1)
            self._takers -= 1

    def _notify(self, work: Work | None = None) -> None:
        """Wake those that wait while another thread makes progress: `work` has ended, or they may drive themselves."""
        with self._changed:
            self._changed.notify_all()

    def hurry(self) -> None:
        """See `Driver.hurry`: the background thread looks soon enough."""

    def _nudge(self, background: bool) -> None:
        """Wake whoever sleeps on the links; make sure that somebody drives when nobody waits."""
        with self._mutex:
            if background and (self._thread is None or not self._thread.is_alive()):
                if self._wake is None:
                    self._wake = os.pipe()
                self._thread = threading.Thread(target=self._background, name=f"hostring-p2p-{self._rank}", daemon=True)
                self._thread.start()
            if self._sleeping and self._wake is not None:
                os.write(self._wake[1], b"!")

    def _background(self) -> None:
        quiet = 0
        while self._cause is None and (quiet < _QUIET_TICKS or not self._retire()):
            time.sleep(TICK)
            quiet = 0 if self._drive_overdue() else quiet + 1

    def _drive_overdue(self) -> bool:
        """Make progress when something has been left alone for a tick and nobody else does. Returns whether anything is under way."""
        if not self._busy():
            return False
        with self._mutex:
            since = perf_counter() - TICK
            overdue = any(w.deadline - w.seconds < since for w in self._waiting()) or any(
                link.incoming for link in self._links.values()
            )
        if overdue and not self._takers and self._driver.acquire(blocking=False):
            try:
                self._drive(lambda: self._takers > 0 or self._cause is not None or not self._busy(), None)
            finally:
                self._driver.release()
                self._notify()
        return True

    def _retire(self) -> bool:
        with self._mutex:
            if self._busy():
                return False
            self._thread = None
            return True

    def _waiting(self) -> list[MessageWork]:
        """Posted receives without a message, and sends that the links have not taken."""
        return [*self._matching.posted, *(w for link in self._links.values() for _, w in link.outgoing)]

    def _busy(self) -> bool:
        return bool(self._matching.posted or any(link.outgoing or link.incoming for link in self._links.values()))

    def _drive(self, until: Callable[[], bool], deadline: float | None) -> None:
        idle = 0
        while not until():
            with self._mutex:
                progress = self._pass()
            if progress:
                idle = 0
                continue
            idle += 1
            if idle > _SPINS:
                self._expire()
                self._sleep(deadline, until)

    def _pass(self) -> bool:
        """Send and receive what is possible without waiting."""
        progress = False
        for link in self._links.values():
            if link.lost is None:
                progress |= self._try(link, link.move)
            elif link.outgoing or link.incoming or any(w.wanted == link.rank for w in self._matching.posted):
                self._fail(link.lost)
        return progress

    def _try(self, link: MessageLink, move: Callable[[], bool]) -> bool:
        """`move` something on `link`. A rank that is lost is a failure only once something is wanted of it."""
        try:
            return move()
        except PeerLostError as exc:
            link.lost = exc
            return True
        except HostringError as exc:
            self._fail(exc)
            return True

    def _expire(self) -> None:
        now = perf_counter()
        with self._mutex:
            late = [w for w in self._waiting() if now > w.deadline]
        for work in late[:1]:
            self._control.receiving = self._as_waiting(work)
            self._fail(self._control.timed_out(self._as_waiting(work), "did not take part", work.seconds))

    def _sleep(self, deadline: float | None, until: Callable[[], bool]) -> None:
        poller = select.poll()
        with self._mutex:
            if self._cause is not None:  # the links may be closed
                return
            waiting = self._waiting()
            deadlines = [w.deadline for w in waiting]
            for link in self._links.values():
                if link.lost is None:
                    link.register(poller)
            self._control.register(poller)
            if self._wake is None:
                self._wake = os.pipe()
            poller.register(self._wake[0], select.POLLIN)
            self._sleeping = True
            if self._pass() or until():  # what came before the doorbells were set would be slept through
                self._sleeping = False
                return
        seconds = min(
            [self._control.patience(), *(d - perf_counter() for d in [*deadlines, *([deadline] if deadline else [])])]
        )
        self._control.receiving = self._as_waiting(waiting[0]) if waiting else None
        events = poller.poll(max(0.0, seconds) * 1000 + 1)
        self._sleeping = False
        if self._wake is not None and any(fd == self._wake[0] for fd, _ in events):
            os.read(self._wake[0], 4096)
        try:
            self._control.hear(events)
        except HostringError as exc:
            self._fail(exc)
        self._control.receiving = None

    def _as_waiting(self, work: MessageWork) -> Waiting:
        return Waiting(min(self._links) if work.wanted is None else work.wanted, work.what)

    def _fail(self, exc: HostringError) -> None:
        cause = self._control.settle(exc)
        self._control.flood(cause)
        self.abort(cause)

    def abort(self, cause: HostringError) -> None:
        """End everything that is under way with `cause`."""
        with self._mutex:
            self._cause = cause
            left = [*self._waiting(), *(link.incoming for link in self._links.values() if link.incoming)]
            self._matching.posted.clear()
            for link in self._links.values():
                link.outgoing.clear()
        for work in left:
            if not work.is_completed():
                work.finish(error=again(cause))
        self._nudge(False)

    def forsake(self, cause: HostringError) -> None:
        """In a forked child: refuse every call."""
        self._cause = cause
        self._mutex = threading.RLock()
        self._matching.posted.clear()

    def close(self, seconds: float = 5.0) -> None:
        """Send what was accepted, then end the background thread. The links are closed by whoever made them."""
        deadline = perf_counter() + seconds
        while self._cause is None and any(link.outgoing for link in self._links.values()) and perf_counter() < deadline:
            with self._mutex:
                for link in self._links.values():
                    self._try(link, link.push)
            select.select([], [], [], 0.001)
        if self._cause is None:
            self.abort(HostringError(f"rank {self._rank} closed the group", self._rank))
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        if self._driver.acquire(
            timeout=max(1.0, seconds)
        ):  # who drives may sleep on the pipe, and has been woken to leave
            with self._mutex:
                for end in self._wake or ():
                    os.close(end)
                self._wake = None
            self._driver.release()
