"""The threads on which torch's futures are completed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class _Callbacks:
    """Runs users' callbacks on threads that don't communicate, so a callback may call a collective and wait for it.

    Callbacks start in the order in which the operations ended. An idle thread takes the next one; when none is
    idle, a new thread starts. So a callback may wait for another.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._loop, name="hostring-callbacks", daemon=True).start()
        self._jobs.put(job)

    def _loop(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


run_callback = _Callbacks().run
