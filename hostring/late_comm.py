"""Groups whose links are made in the background: the first call waits for them, and not `hostring.init`.

torch's programs make many groups at their start, and use some of them late or never.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from functools import partial
from typing import Any

from hostring.comm import Comm
from hostring.engine.causes import fresh_copy
from hostring.errors import HostringError
from hostring.group.group import Found, Group

CLOSE_WAIT_S = 5.0  # how long close() waits for links that are still being made


class LateComm(Comm):
    """A `Comm` from the start for whoever holds it. It gets a `Comm`'s attributes when one of them is first needed.

    Args:
        found: the ranks, which know of each other.
        form: makes a `Comm` of the group that has links.
    """

    def __init__(self, found: Found, form: Callable[[Group], Comm]) -> None:
        self._waiting, self._process = found.start.waiting, os.getpid()
        self._waiting.speaks = False  # until somebody waits for these links
        self.rank, self.world_size = found.start.rank, found.start.world_size
        if not hasattr(_of_this_thread, "background"):  # ranks that are threads wait for each other
            _of_this_thread.background = Background()
        self._formed: Future[Comm] = _of_this_thread.background.submit(lambda: form(found.link()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_formed", "_waiting", "_process"):
            raise AttributeError(name)
        vars(self).update(vars(self._wait()))
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(f"a Comm has no attribute {name!r}") from None

    def _wait(self) -> Comm:
        """Raises: HostringError, as `hostring.init` does, if the links can't be made."""
        if os.getpid() != self._process:
            raise RuntimeError("this process was forked while its parent made the links of this group; make a new one")
        self._waiting.speaks = True
        try:
            return self._formed.result()
        except HostringError as exc:
            raise fresh_copy(exc) from exc

    def close(self) -> None:
        """See `Comm.close`."""
        self._end(CLOSE_WAIT_S, lambda comm: comm.close())

    def abort(self, reason: str = "aborted by the user") -> None:
        """See `Comm.abort`."""
        self._end(0.0, lambda comm: comm.abort(reason))

    def _end(self, seconds: float, end: Callable[[Comm], None]) -> None:
        """Call `end` now, or as soon as there are links, if it takes longer than `seconds` to make them."""
        if os.getpid() != self._process:
            return
        try:
            end(self._formed.result(seconds))
        except TimeoutError:
            self._formed.add_done_callback(partial(_end_formed, end))
        except Exception:
            if not self._formed.done() or self._formed.exception() is None:
                raise  # from `end`; a group that was never formed is closed

    def __repr__(self) -> str:
        if self._formed.done():
            return super().__repr__()
        return f"<hostring.Comm rank {self.rank} of {self.world_size}, its links are being made>"


def _end_formed(end: Callable[[Comm], None], formed: Future[Comm]) -> None:
    if formed.exception() is None:
        end(formed.result())


class Background:
    """One thread that carries out jobs in the order in which they came, and ends when there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Callable[[], Comm], Future[Comm]]] = deque()
        self._running = False

    def submit(self, job: Callable[[], Comm]) -> Future[Comm]:
        """Have `job` done. Ranks that share several groups must submit them in one order, as they must make them."""
        future: Future[Comm] = Future()
        with self._lock:
            self._jobs.append((job, future))
            start, self._running = not self._running, True
        if start:
            threading.Thread(target=self._work, name="hostring-groups", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return
                job, future = self._jobs.popleft()
            try:
                comm = job()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(comm)


_of_this_thread = threading.local()
