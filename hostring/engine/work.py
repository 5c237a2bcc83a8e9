"""Handles of asynchronous operations, and the one worker thread of a group that carries them out in order."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final, Protocol

from hostring.errors import OperationTimeout

TICK: Final = 0.001  # seconds after which an operation that nobody waits for is begun
_QUIET_TICKS: Final = 200  # the thread sleeps until the next call after so many ticks without one
CLOSE_WAIT_S: Final = 5.0  # how long close() waits for a call on another thread


class Driver(Protocol):
    """Carries works out by itself, but not at once, so that whoever waits can do it in its own thread."""

    def help(self, work: Work) -> None:
        """Carry `work` out on this thread, unless another one has begun."""

    def hurry(self) -> None:
        """Begin now: somebody needs the end of a work without waiting for it here."""


class Work:
    """An operation under way. `wait()` returns its result, or raises what it raised."""

    __slots__ = ("_callbacks", "_done", "_driver", "_error", "_lock", "_result", "_sleepers", "what")

    def __init__(self, what: str, driver: Driver | None = None) -> None:
        self.what = what
        self._driver = driver
        self._done = False
        self._sleepers: threading.Event | None = None  # made when somebody has to sleep, which is seldom
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Work], object]] = []
        self._result: Any = None
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. Never waits; the operation makes progress without `wait`."""
        return self._done

    def exception(self) -> BaseException | None:
        """The exception that it raised; None while it is under way or when it ended well."""
        return self._error

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end and return the result.

        Args:
            timeout: seconds for this wait; None leaves it to the operation's own deadline.

        Raises:
            OperationTimeout: `timeout` passed; the operation goes on.
            BaseException: whatever the operation raised.
        """
        if self._driver is not None and not self._done:
            if timeout is None:
                self._driver.help(self)
            if not self._done:
                self._driver.hurry()
        if not self._done and not self._sleep(timeout):
            raise OperationTimeout(f"{self.what} was not done within {timeout:.1f} s of waiting; it goes on")
        if self._error is not None:
            raise self._error
        return self._result

    def _sleep(self, timeout: float | None) -> bool:
        with self._lock:
            if self._done:
                return True
            sleepers = self._sleepers = self._sleepers or threading.Event()
        return sleepers.wait(timeout)

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call `callback(self)` when it ends, on the thread that ends it; at once when it has ended."""
        with self._lock:
            done = self._done
            if not done:
                self._callbacks.append(callback)
        if done:
            callback(self)
        elif self._driver is not None:
            self._driver.hurry()

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """End it. Called by whoever carries the operation out."""
        with self._lock:
            self._result, self._error = result, error
            callbacks, self._callbacks = self._callbacks, []
            self._done = True
            if self._sleepers is not None:
                self._sleepers.set()
        for callback in callbacks:
            callback(self)


class Turns:
    """Runs the operations of one group one after the other, in the order in which they came, over all threads.

    A blocking call runs in its own thread when nothing is queued. Queued calls are carried out by whoever waits for
    them, else by one daemon thread. It starts with the first asynchronous call and looks once in a millisecond,
    because most calls are waited for at once, and waking a thread costs several times as much as a small collective.

    Attributes:
        turn: held by whoever runs an operation. queued: operations that nobody has begun.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.turn = threading.Lock()
        self.queued: deque[tuple[Callable[[], Any], Work]] = deque()
        self.holder = 0  # the thread that has the turn, and may call again
        self._starting = threading.Lock()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._parked = False

    def run(self, job: Callable[..., Any], what: str, *args: Any) -> Any:
        """Run `job(*args)` here if it is its turn now, or if this thread has the turn; else queue it and wait."""
        if self.holder == get_ident():
            return job(*args)
        if not self.queued and self.turn.acquire(blocking=False):
            self.holder = get_ident()
            try:
                return job(*args)
            finally:
                self.holder = 0
                self.turn.release()
        return self.submit(lambda: job(*args), what).wait()

    def submit(self, job: Callable[[], Any], what: str) -> Work:
        """Queue `job`."""
        work = Work(what, self)
        self.queued.append((job, work))
        if self._thread is None:
            self._start()
        if self._parked:
            self._wake.put(True)
        return work

    def help(self, work: Work) -> None:
        """See `Driver.help`. What was queued before `work` comes first; nothing after it is begun."""
        while not work.is_completed() and self.turn.acquire(blocking=False):
            if not self._next():
                break

    def hurry(self) -> None:
        """See `Driver.hurry`."""
        self._wake.put(True)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        quiet, stay = 0, True
        while stay:
            stay = self._look(quiet)
            quiet = 0 if self.queued else quiet + 1
            while self.queued:
                self.turn.acquire()
                self._next()

    def _look(self, quiet: int) -> bool:
        """Wait for a tick, or for the next call after many quiet ticks. Returns False when the group is closed."""
        if quiet < _QUIET_TICKS:
            try:
                return self._wake.get(timeout=TICK)
            except queue.Empty:
                return True
        self._parked = True
        try:
            return True if self.queued else self._wake.get()
        finally:
            self._parked = False

    def _next(self) -> bool:
        """Run the first of the queue, with the turn held, and release the turn. Returns whether there was one."""
        result, error = None, None
        try:
            if not self.queued:
                return False
            job, work = self.queued.popleft()
            self.holder = get_ident()
            try:
                result = job()
            except BaseException as exc:  # whoever waits for the work gets it
                error = exc
            self.holder = 0
        finally:
            self.turn.release()
        work.finish(result, error)
        return True

    def close(self, timeout: float) -> bool:
        """Carry out what was accepted, end the thread, and wait for a blocking call on another thread.

        Returns whether the thread ended within `timeout` seconds.
        """
        with self._starting:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._wake.put(False)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        # Not for long: a signal handler may close the group during a call of its own thread.
        if self.holder != get_ident() and self.turn.acquire(timeout=min(timeout, CLOSE_WAIT_S)):
            self.turn.release()
        return thread is None or not thread.is_alive()
