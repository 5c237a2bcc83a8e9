"""Coroutines that wait for sockets, run in the calling thread.

Not asyncio's: that takes some 30 ms of CPU to import, which every rank would pay at its first group, and it can't run
inside the event loop of a caller, so that it would need a thread of its own for every start.
"""

from __future__ import annotations

import select
import socket
import time
import types
from collections import deque
from collections.abc import Collection, Coroutine, Generator
from math import inf
from typing import Any


class Pause:
    """What a task waits for: `sock`, or the end of one of `tasks`, and no longer than `until` (monotonic time)."""

    __slots__ = ("events", "fd", "tasks", "until")

    def __init__(self, until: float, sock: socket.socket | None, events: int, tasks: Collection[Task] = ()) -> None:
        self.until, self.fd, self.events, self.tasks = until, -1 if sock is None else sock.fileno(), events, tasks


class Task:
    """A coroutine under way.

    Attributes:
        done: it returned, raised, or was cancelled.
        result: what it returned.
        error: what it raised.
    """

    def __init__(self, coroutine: Coroutine[Pause, bool, Any]) -> None:
        self.coroutine = coroutine
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None
        self.pause: Pause | None = None


@types.coroutine
def _pause(pause: Pause) -> Generator[Pause, bool, bool]:
    return (yield pause)


async def readable(sock: socket.socket, until: float = inf) -> None:
    """Return when `sock` has something to read.

    Raises:
        TimeoutError: it has nothing by `until`.
    """
    if not await _pause(Pause(until, sock, select.POLLIN)):
        raise TimeoutError


async def writable(sock: socket.socket, until: float = inf) -> None:
    """Return when `sock` takes bytes, or is connected.

    Raises:
        TimeoutError: it does not by `until`.
    """
    if not await _pause(Pause(until, sock, select.POLLOUT)):
        raise TimeoutError


async def sleep(seconds: float) -> None:
    """Let the other tasks go on."""
    await _pause(Pause(time.monotonic() + seconds, None, 0))


async def first_done(tasks: Collection[Task], seconds: float = inf) -> None:
    """Return when one of `tasks` has ended, or after `seconds`."""
    if not any(task.done for task in tasks):
        await _pause(Pause(time.monotonic() + seconds, None, 0, tasks))


async def all_done(tasks: Collection[Task]) -> None:
    """Return when all of `tasks` have ended, or raise what one of them raised."""
    while True:
        for task in tasks:
            if task.error is not None:
                raise task.error
        left = [task for task in tasks if not task.done]
        if not left:
            return
        await first_done(left)


class Tasks:
    """The tasks of one thread, which runs them in `turn`."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._waiting: dict[Task, None] = {}  # in the order in which they began to wait
        self._by_fd: dict[int, Task] = {}
        self._ready: deque[Task] = deque()

    def start(self, coroutine: Coroutine[Pause, bool, Any]) -> Task:
        """Run `coroutine` until it waits for the first time, and go on with it in later turns."""
        task = Task(coroutine)
        self._go_on(task, None)
        return task

    def turn(self, until: float) -> None:
        """Wait until something happens, at most until `until` (monotonic time), and let the tasks concerned go on."""
        until = 0.0 if self._ready else self._soonest(until)
        events = self._poll.poll(max(0.0, until - time.monotonic()) * 1000)
        # a task that goes on may end another, and open a socket that gets the other's descriptor
        due = [(task, task.pause) for task in (self._by_fd[fd] for fd, _ in events)]
        for task, pause in due:
            if task.pause is pause:
                self._go_on(task, True)
        now = time.monotonic()
        for task in [t for t in self._waiting if t.pause is not None and t.pause.until <= now]:
            if task.pause is not None and task.pause.until <= now:
                self._go_on(task, False)
        while self._ready:
            task = self._ready.popleft()
            if task.pause is not None:
                self._go_on(task, True)

    def cancel(self, task: Task) -> None:
        """End `task` now. Its `finally` blocks run, and must not wait."""
        if not task.done:
            self._forget(task)
            task.coroutine.close()
            self._ended(task)

    def end(self) -> None:
        """Cancel all tasks."""
        while self._waiting:
            self.cancel(next(iter(self._waiting)))

    def _soonest(self, until: float) -> float:
        return min([until, *(task.pause.until for task in self._waiting if task.pause is not None)])

    def _go_on(self, task: Task, happened: bool | None) -> None:
        self._forget(task)
        try:
            pause = task.coroutine.send(happened)  # type: ignore[arg-type]
        except StopIteration as stop:
            task.result = stop.value
            self._ended(task)
        except Exception as exc:
            task.error = exc
            self._ended(task)
        else:
            self._wait(task, pause)

    def _ended(self, task: Task) -> None:
        task.done = True
        self._ready += [other for other in self._waiting if other.pause is not None and task in other.pause.tasks]

    def _wait(self, task: Task, pause: Pause) -> None:
        task.pause = pause
        self._waiting[task] = None
        if pause.fd >= 0:
            self._by_fd[pause.fd] = task
            self._poll.register(pause.fd, pause.events)

    def _forget(self, task: Task) -> None:
        pause, task.pause = task.pause, None
        self._waiting.pop(task, None)
        if pause is not None and pause.fd >= 0:
            del self._by_fd[pause.fd]
            self._poll.unregister(pause.fd)
