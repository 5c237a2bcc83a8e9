"""The texts of one HTTP request: submitted together, their events in one queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.types import Receive

from hostring.integrations.llm.serve.http.errors import ApiError
from hostring.integrations.llm.serve.scheduler import QueueFull, Scheduler, Unavailable
from hostring.integrations.llm.serve.text_request import Broken, Deliver, Ended, Event, TextRequest

GONE = None
"""In place of an event: the client has gone away."""


class Answers:
    """Texts under way.

    Raises:
        ApiError: too many wait already, or the group is not whole.
    """

    def __init__(self, scheduler: Scheduler, requests: Sequence[TextRequest]) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        self._scheduler = scheduler
        self._left = len(requests)
        try:
            self._sequences = scheduler.submit(list(requests), [self._deliver(i) for i in range(len(requests))])
        except QueueFull as exc:
            raise ApiError(429, str(exc), code="rate_limit_exceeded") from exc
        except Unavailable as exc:
            raise ApiError(503, str(exc), code="unavailable") from exc

    def _deliver(self, index: int) -> Deliver:
        def deliver(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the HTTP thread has ended
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

        return deliver

    @property
    def complete(self) -> bool:
        """No more events come."""
        return not self._left

    async def next(self, wait_s: float | None = None) -> tuple[int, Event] | None:
        """The next event with the number of its text, or GONE.

        Raises:
            TimeoutError: nothing happened in `wait_s` seconds.
        """
        found = await asyncio.wait_for(self._queue.get(), wait_s)
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
        watcher = asyncio.create_task(_until_gone(receive, lambda: self._queue.put_nowait(GONE)))
        try:
            yield
        finally:
            watcher.cancel()
            self.cancel()


async def _until_gone(receive: Receive, tell: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    tell()
