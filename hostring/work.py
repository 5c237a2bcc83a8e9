"""Handles of asynchronous operations, and the one worker thread of a group that carries them out in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from .errors import OperationTimeout


class Work:
    """An operation under way. `wait()` returns its result, or raises what it raised."""

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_result", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Work], object]] = []
        self._result: Any = None
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. Never waits; the operation makes progress without `wait`."""
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        """What it raised, or None: also while it is still under way."""
        return self._error

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end and return the result.

        Args:
            timeout: seconds for this wait; None leaves it to the operation's own deadline.

        Raises:
            OperationTimeout: `timeout` passed; the operation goes on.
            BaseException: whatever the operation raised.
        """
        if not self._done.wait(timeout):
            raise OperationTimeout(f"{self.what} was not done within {timeout:.1f} s of waiting; it goes on")
        if self._error is not None:
            raise self._error
        return self._result

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call `callback(self)` when it ends, on the thread that ends it; at once when it has ended."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """End it. For the side that carries the operation out."""
        with self._lock:
            self._result, self._error = result, error
            callbacks, self._callbacks = self._callbacks, []
            self._done.set()
        for callback in callbacks:
            callback(self)


class Turns:
    """Gives the operations of one group their order: first come, first served, over all threads.

    A blocking call runs in its own thread when nothing is queued. Otherwise it waits its turn behind the queue, which
    one daemon thread works off; the thread starts with the first asynchronous call.

    Attributes:
        turn: held by whoever runs an operation. queued: operations that are not done yet in the worker's queue.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.turn = threading.Lock()
        self._count = threading.Lock()
        self.queued = 0
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Work] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[..., Any], what: str, *args: Any) -> Any:
        """Run `job(*args)` here when it is its turn at once, else behind the queue. Returns its result."""
        if not self.queued and self.turn.acquire(blocking=False):
            try:
                return job(*args)
            finally:
                self.turn.release()
        return self.submit(lambda: job(*args), what).wait()

    def submit(self, job: Callable[[], Any], what: str) -> Work:
        """Queue `job` for the worker thread."""
        work = Work(what)
        with self._count:
            self.queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put((job, work))
        return work

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            job, work = item
            result, error = None, None
            with self.turn:
                try:
                    result = job()
                except BaseException as exc:  # it belongs to whoever waits for the work
                    error = exc
            with self._count:
                self.queued -= 1
            work.finish(result, error)

    def close(self, timeout: float) -> bool:
        """Work off what was accepted, then end the thread. Returns whether that was done within `timeout` seconds."""
        with self._count:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()
