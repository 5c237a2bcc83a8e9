"""The texts of one HTTP request: submitted together, their events in one mailbox.

The thread that takes events shares the interpreter with the thread of the steps. So an event costs as little here as it
can: no task and no timer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.types import Receive

from hostring.integrations.llm.serve.http.errors import ApiError
from hostring.integrations.llm.serve.scheduler import QueueFull, Scheduler, Unavailable
from hostring.integrations.llm.serve.text_request import Broken, Deliver, Ended, Event, TextRequest

GONE = None
"""In place of an event: the client has gone away."""


class Mailbox:
    """What one reader waits for."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event] | None] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: tuple[int, Event] | None) -> None:
        """On the thread of the loop."""
        self._events.append(event)
        self.wake()

    def put_from_thread(self, event: tuple[int, Event] | None) -> None:
        """On any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.put, event)

    def wake(self) -> None:
        """Let the reader look, if it waits."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def arrive(self) -> None:
        """Until there is an event, or `wake` is called."""
        if not self._events:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def take(self) -> tuple[int, Event] | None:
        """The oldest event.

        Raises:
            IndexError: there is none.
        """
        return self._events.popleft()

    def __len__(self) -> int:
        return len(self._events)


class Answers:
    """Texts under way.

    Raises:
        ApiError: too many wait already, or the group is not whole.
    """

    def __init__(self, scheduler: Scheduler, requests: Sequence[TextRequest]) -> None:
        self._mailbox = Mailbox()
        self._scheduler = scheduler
        self._left = len(requests)
        try:
            self._sequences = scheduler.submit(list(requests), [self._deliver(i) for i in range(len(requests))])
        except QueueFull as exc:
            raise ApiError(429, str(exc), code="rate_limit_exceeded") from exc
        except Unavailable as exc:
            raise ApiError(503, str(exc), code="unavailable") from exc

    def _deliver(self, index: int) -> Deliver:
        return lambda event: self._mailbox.put_from_thread((index, event))

    @property
    def complete(self) -> bool:
        """No more events come."""
        return not self._left

    async def arrive(self) -> bool:
        """Until there is an event, or until `wake` is called. Returns whether there is one."""
        await self._mailbox.arrive()
        return bool(self._mailbox)

    def wake(self) -> None:
        """Let `arrive` return."""
        self._mailbox.wake()

    async def next(self) -> tuple[int, Event] | None:
        """The next event with the number of its text, or GONE."""
        while not self._mailbox:
            await self._mailbox.arrive()
        found = self._mailbox.take()
        if found is not None and isinstance(found[1], Ended | Broken):
            self._left -= 1
        return found

    def cancel(self) -> None:
        """Nobody wants these texts any more. Does nothing to those that are complete."""
        if self._left:
            for sequence in self._sequences:
                self._scheduler.cancel(sequence)

    @contextlib.asynccontextmanager
    async def watched(self, receive: Receive) -> AsyncIterator[None]:
        """Inside, a client that goes away ends its texts; at the end, what is not complete is cancelled."""
        watcher = asyncio.create_task(_until_gone(receive, lambda: self._mailbox.put(GONE)))
        try:
            yield
        finally:
            watcher.cancel()
            self.cancel()


async def _until_gone(receive: Receive, tell: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    tell()
