"""Who drives the message links, and until when: whoever waits, else a background thread.

Whoever waits makes progress for everybody: it sends what is queued and receives what comes, so two ranks that both send
first don't block each other. A background thread drives operations that nobody waits for. It looks for such once in a
millisecond: most are waited for at once, and handing progress from thread to thread takes longer than a message.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from time import perf_counter
from typing import Final

from hostring.engine.control import Control
from hostring.engine.exchange import yield_core
from hostring.engine.matching import MessageWork
from hostring.engine.message_traffic import MessageTraffic
from hostring.engine.work import TICK, Work

_MAX_SPINS: Final = 200
_MIN_SPINS: Final = 4
_QUIET_TICKS: Final = 200  # the background thread ends after so many with nothing to do


class MessageDriver:
    """Keeps `traffic` going. The `Driver` of its works."""

    def __init__(self, traffic: MessageTraffic, control: Control) -> None:
        self._traffic, self._control = traffic, control
        self._driving = threading.Lock()  # held by the thread that drives
        self._starting = threading.Lock()  # of the background thread and the pipe that wakes it
        self._changed = threading.Condition()
        self._takers = 0  # threads that wait for the background thread to let them drive
        self._spins = _MAX_SPINS
        self._wake: tuple[int, int] | None = None
        self._sleeping = False
        self.thread: threading.Thread | None = None

    def help(self, work: Work) -> None:
        """See `Driver.help`."""
        waiting = False
        while not work.is_completed():
            if self._driving.acquire(blocking=False):
                try:
                    self._drive(work.is_completed, work.deadline if isinstance(work, MessageWork) else None)
                finally:
                    self._driving.release()
                    self._notify(work)
            elif not waiting:
                waiting = True
                work.add_done_callback(self._notify)
            else:
                self._take_over(work)

    def _take_over(self, work: Work) -> None:
        """Wait until `work` has ended or its driver leaves.

        The background thread leaves when asked, other threads when their own work has ended.
        """
        with self._changed:
            self._takers += 1
        self.nudge(False)
        with self._changed:
            self._changed.wait_for(lambda: work.is_completed() or not self._driving.locked(), timeout=0.1)
            self._takers -= 1

    def _notify(self, work: Work | None = None) -> None:
        """Wake those that wait while another thread makes progress: `work` has ended, or they may drive themselves."""
        with self._changed:
            self._changed.notify_all()

    def hurry(self) -> None:
        """See `Driver.hurry`: the background thread looks soon enough."""

    def nudge(self, background: bool) -> None:
        """Wake whoever sleeps on the links; with `background`, make sure that somebody drives when nobody waits."""
        with self._starting:
            if background and (self.thread is None or not self.thread.is_alive()):
                self._pipe()
                name = f"hostring-p2p-{self._traffic.rank}"
                self.thread = threading.Thread(target=self._background, name=name, daemon=True)
                self.thread.start()
            if self._sleeping and self._wake is not None:
                os.write(self._wake[1], b"!")

    def _pipe(self) -> int:
        """The descriptor that wakes whoever sleeps on the links."""
        if self._wake is None:
            self._wake = os.pipe()
        return self._wake[0]

    def _background(self) -> None:
        quiet = 0
        while self._traffic.cause is None and (quiet < _QUIET_TICKS or not self._retire()):
            time.sleep(TICK)
            quiet = 0 if self._drive_overdue() else quiet + 1

    def _drive_overdue(self) -> bool:
        """Drive what has been left alone for a tick, when nobody else does. Returns whether anything is under way."""
        traffic = self._traffic
        if not traffic.busy():
            return False
        if traffic.overdue(TICK) and not self._takers and self._driving.acquire(blocking=False):
            try:
                self._drive(lambda: self._takers > 0 or traffic.cause is not None or not traffic.busy(), None)
            finally:
                self._driving.release()
                self._notify()
        return True

    def _retire(self) -> bool:
        with self._starting:
            if self._traffic.busy():
                return False
            self.thread = None
            return True

    def _drive(self, until: Callable[[], bool], deadline: float | None) -> None:
        """Make progress `until` it is enough: look again for a while, then sleep.

        Looking pays where the other rank runs. Where other processes want the cores, it only keeps the rank that is
        waited for from running, and this one is woken later for the time that it has used. So it looks less often after
        each time in vain, and more often after bytes came while it looked.
        """
        idle = 0
        while not until():
            if self._traffic.move():
                if idle:
                    self._spins = min(2 * self._spins, _MAX_SPINS)
                idle = 0
                continue
            idle += 1
            if idle > self._spins:
                self._spins = max(self._spins // 2, _MIN_SPINS)
                self._traffic.expire()
                self._sleep(deadline, until)
                idle = 0  # what comes now was not worth looking for
            else:
                yield_core()

    def _sleep(self, deadline: float | None, until: Callable[[], bool]) -> None:
        traffic, poller = self._traffic, select.poll()
        with self._starting:
            wake = self._pipe()
            self._sleeping = True
        poller.register(wake, select.POLLIN)
        deadlines = traffic.arm(poller)
        if (
            traffic.cause is not None or traffic.move() or until()
        ):  # bytes that came before the doorbells were set would not ring them
            self._sleeping = False
            return
        now = perf_counter()
        limits = [d - now for d in (*deadlines, *(() if deadline is None else (deadline,)))]
        events = poller.poll(max(0.0, min([self._control.patience(), *limits])) * 1000 + 1)
        self._sleeping = False
        if any(fd == wake for fd, _ in events):
            os.read(wake, 4096)
        traffic.awake(events)

    def close(self, seconds: float) -> None:
        """End the background thread and give up the pipe. Everything under way has been ended."""
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        if self._driving.acquire(
            timeout=max(1.0, seconds)
        ):  # who drives may sleep on the pipe, and has been woken to leave
            with self._starting:
                for end in self._wake or ():
                    os.close(end)
                self._wake = None
            self._driving.release()
