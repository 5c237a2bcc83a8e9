"""Who may talk to the server: names and pages that may call it, keys, and how long a request may take to arrive."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import platform
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from hostring.integrations.llm.serve.http.errors import ApiError
from hostring.integrations.llm.serve.options import ServeOptions

MAX_CONNECTIONS = 1000
MAX_ARRIVAL_S = 10.0  # how long the headers of a request, and then its body, may take to arrive
OPEN_PATHS = ("/health",)  # answered without a key; and so is the page, which asks for it
_CORS = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600", "Vary": "Origin"}


class Guard:
    """An ASGI application that lets requests through to another one, or says why not."""

    def __init__(self, app: ASGIApp, options: ServeOptions, open_paths: Collection[str]) -> None:
        self._app, self._open_paths = app, frozenset((*OPEN_PATHS, *open_paths))
        self._hosts = frozenset(name.lower() for name in ("localhost", platform.node(), *options.allow_hosts))
        self._origins = frozenset(options.allow_origins)
        self._keys = [_digest(key) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        try:
            self._check_host(headers.get("host", ""))
            foreign = self._check_origin(origin, headers.get("host", ""))
            if foreign and scope["method"] == "OPTIONS":
                asked = headers.get("access-control-request-headers", "")
                allowed = {"Access-Control-Allow-Origin": str(origin), "Access-Control-Allow-Headers": asked, **_CORS}
                await Response(status_code=204, headers=allowed)(scope, receive, send)
                return
            if self._keys and scope["path"] not in self._open_paths:
                self._check_key(headers.get("authorization", ""))
        except ApiError as exc:
            await exc.response()(scope, receive, send)
            return
        await self._app(scope, _in_time(receive), _with_origin(send, str(origin)) if foreign else send)

    def _check_host(self, host: str) -> None:
        """A page of another site that has its name point here would send that name. An address is nobody's name."""
        name = _name_of(host)
        if name in self._hosts:
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise ApiError(
                403,
                f"this server is not called {host[:100]!r}; start it with --allow-host NAME",
                code="host_not_allowed",
            ) from None

    def _check_origin(self, origin: str | None, host: str) -> bool:
        """Whether the request comes from a page of another origin that is allowed."""
        if origin is None:
            return False
        if origin in self._origins:
            return True
        parts = urlsplit(origin)
        if parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower():
            return False
        raise ApiError(
            403,
            f"pages of {origin[:100]!r} may not call this server; start it with --allow-origin ORIGIN",
            code="origin_not_allowed",
        )

    def _check_key(self, authorization: str) -> None:
        kind, _, key = authorization.partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise ApiError(
                401, "You didn't provide an API key; send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
        if not sum(hmac.compare_digest(_digest(key.strip()), known) for known in self._keys):  # all, in equal time
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _name_of(host: str) -> str:
    """The name in a Host header, without the port and without the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _with_origin(send: Send, origin: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            added = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return sending


def _in_time(receive: Receive) -> Receive:
    """Ends a request whose body comes too slowly. After the body, what is received is that the client goes away."""
    until = asyncio.get_running_loop().time() + MAX_ARRIVAL_S
    complete = False

    async def receiving() -> Message:
        nonlocal complete
        if complete:
            return await receive()
        try:
            left = until - asyncio.get_running_loop().time()
            message = await asyncio.wait_for(receive(), max(0.0, left))
        except asyncio.TimeoutError:
            raise ApiError(408, f"the request took more than {MAX_ARRIVAL_S:g} s to arrive", code="timeout") from None
        complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return receiving


class TimedProtocol(H11Protocol):
    """uvicorn's connection, closed when the headers of a request take too long, or when there are too many others."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        """Close the connection unless a request is complete in time."""
        if self._late is None:
            self._late = self.loop.call_later(MAX_ARRIVAL_S, self._close_if_waiting)

    def _close_if_waiting(self) -> None:
        self._late = None
        if self.cycle is None or (self.cycle.response_complete and self.timeout_keep_alive_task is None):
            self.transport.close()
