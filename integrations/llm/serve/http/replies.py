"""An answer on its way to the client: whole, or as server-sent events while it is written."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from hostring.integrations.llm.serve.http.answers import GONE, Answers
from hostring.integrations.llm.serve.http.errors import ApiError
from hostring.integrations.llm.serve.http.usage import Usage
from hostring.integrations.llm.serve.text_request import Broken, Event

KEEPALIVE_S = 1.0  # after so long without an event, a comment shows that the connection lives
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once, not for every chunk
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Form(Protocol):
    """How one kind of completion is written down."""

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Choices of the chunks with which the stream of a text begins."""

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Choices of the chunks that tell an event."""

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A whole chunk."""

    def whole(self) -> dict[str, Any]:
        """The answer, after all events have been passed to `chunks`."""


@dataclass
class Reply:
    """Answers to one request, as an ASGI application.

    Args:
        stream: as events. include_usage: with a last one that counts tokens.
    """

    answers: Answers
    form: Form
    usage: Usage
    stream: bool
    include_usage: bool
    indices: Sequence[int]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.answers.watched(receive):
            if self.stream:
                await self._stream(send)
            else:
                await (await self._whole())(scope, receive, send)

    async def _whole(self) -> JSONResponse:
        while not self.answers.complete:
            found = await self.answers.next()
            if found is GONE:
                return JSONResponse({}, 499)  # nobody reads it
            index, event = found
            if isinstance(event, Broken):
                return ApiError(503 if event.fault else 400, event.message).response()
            self.usage.note(index, event)
            self.form.chunks(index, event)
        return JSONResponse({**self.form.whole(), "usage": self.usage.as_dict()})

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        for index in self.indices:
            await _write(send, self._chunks(self.form.opening(index)))
        quiet = _Quiet(self.answers.wake)
        with quiet.watched():
            while not self.answers.complete:
                if not await self.answers.arrive():
                    if quiet.lasts():
                        await _write(send, b": keepalive\n\n")
                    continue
                found = await self.answers.next()
                quiet.broken = True
                if found is GONE:
                    return
                index, event = found
                if isinstance(event, Broken):
                    error = json.dumps(ApiError(503, event.message, code="stream_broken").as_dict())
                    await _write(send, f"event: error\ndata: {error}\n\n".encode(), more=False)
                    return
                self.usage.note(index, event)
                await _write(send, self._chunks(self.form.chunks(index, event)))
        if self.include_usage:
            await _write(send, _event({**self.form.chunk([]), "usage": self.usage.as_dict()}))
        await _write(send, b"data: [DONE]\n\n", more=False)

    def _chunks(self, choices: list[dict[str, Any]]) -> bytes:
        """Events, a chunk for each choice."""
        usage = {"usage": None} if self.include_usage else {}
        return b"".join([_event({**self.form.chunk([choice]), **usage}) for choice in choices])


class _Quiet:
    """Tells the time since the last event: by one timer for each second of an answer, and none for each event.

    Attributes:
        broken: an event has come since the timer was set.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake, self.broken, self._rang = wake, False, False
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the reader is woken after each `KEEPALIVE_S` without an event."""
        self._set()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def lasts(self) -> bool:
        """Whether the reader was woken for that reason."""
        rang, self._rang = self._rang, False
        return rang

    def _set(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._ring)

    def _ring(self) -> None:
        if not self.broken:
            self._rang = True
            self._wake()
        self.broken = False
        self._set()


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {_to_json(chunk)}\n\n".encode()


async def _write(send: Send, data: bytes, more: bool = True) -> None:
    if data or not more:
        await send({"type": "http.response.body", "body": data, "more_body": more})
