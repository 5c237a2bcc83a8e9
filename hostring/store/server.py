"""The store's server: one daemon thread with an event loop. Rank 0 or the launcher runs it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from hostring import platforms
from hostring.store.client import GET_WAIT_S, MAX_MESSAGE_BYTES
from hostring.store.protocol import pack, prove, proves, typed, unpack
from hostring.store.streams import accept_all, end, receive, send

log = logging.getLogger("hostring")

HELLO_S = 5.0  # for a client to prove that it knows the secret
MAX_HELLO_BYTES = 256  # of a message before that
MAX_STRANGERS = 64  # connections before that
MAX_CONNECTIONS = 8192
MAX_KEYS = 100_000
MAX_VALUES_BYTES = 1 << 28  # of all values together
MAX_CLIENTS_REMEMBERED = 4096
MAX_ANSWERS_REMEMBERED = 16  # of each client


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, asyncio's otherwise (Windows)."""
    if sys.platform != "win32":
        with contextlib.suppress(ImportError):
            import uvloop

            return uvloop.new_event_loop()
    return asyncio.new_event_loop()


class StoreServer:
    """Serves a dictionary on `sockets` (bound and listening; it owns them) until `close`."""

    def __init__(self, sockets: Sequence[socket.socket], secret: bytes = b"") -> None:
        platforms.fill_standard_streams()
        self.id = os.urandom(16)
        self.port: int = sockets[0].getsockname()[1]
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._nbytes = 0
        self._counters: dict[str, int] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._answers: OrderedDict[bytes, OrderedDict[int, Any]] = OrderedDict()
        self._strangers: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        self._clients: set[asyncio.Task[None]] = set()
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(list(sockets), ready), name="hostring-store", daemon=True
        )
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """Stop serving, close every connection and free the port. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self, sockets: list[socket.socket], ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(sockets, ready))
        finally:
            ready.set()
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _serve(self, sockets: list[socket.socket], ready: threading.Event) -> None:
        endings = [accept_all(listener, self._accepted) for listener in sockets]
        ready.set()
        await self._stop.wait()
        for end_accepting, listener in zip(endings, sockets, strict=True):
            end_accepting()
            listener.close()
        await end(self._clients)

    def _accepted(self, sock: socket.socket, who: str) -> None:
        task = asyncio.ensure_future(self._client(sock, who))
        self._clients.add(task)
        task.add_done_callback(functools.partial(self._gone, sock))
        self._strangers[task] = None
        if len(self._strangers) > MAX_STRANGERS or len(self._clients) > MAX_CONNECTIONS:
            self._strangers.popitem(last=False)[0].cancel()  # the one that has kept silent longest

    def _gone(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._clients.discard(task)
        self._strangers.pop(task, None)
        sock.close()
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.debug("hostring: the store lost a client: %s", exc)

    async def _client(self, sock: socket.socket, who: str) -> None:
        # a client that is gone or talks nonsense gets no answer
        with contextlib.suppress(OSError, EOFError, ValueError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = await self._welcome(sock, who)
            while client is not None and not self._stop.is_set():
                await self._answer(client, sock)

    async def _welcome(self, sock: socket.socket, who: str) -> bytes | None:
        """Challenge whoever connects. Returns the client's id, or None for a stranger."""
        greeting = pack({"hostring": "store 1", "server": self.id, "nonce": os.urandom(16)}, MAX_HELLO_BYTES)
        await send(sock, greeting)
        try:
            hello = unpack(await asyncio.wait_for(receive(sock, MAX_HELLO_BYTES), HELLO_S))
            client, nonce, proof = typed(hello, 0, bytes), typed(hello, 1, bytes), typed(hello, 2, bytes)
        except (ValueError, EOFError, asyncio.TimeoutError) as exc:
            log.info("hostring: the store dropped a stranger at %s: %s", who, exc or "silence")
            return None
        if not proves(proof, self._secret, "store client", greeting, client, nonce):
            log.warning("hostring: the store refused %s: it does not know the secret", who)
            await send(sock, pack([False, "the secrets differ (HOSTRING_SECRET)"], MAX_HELLO_BYTES))
            return None
        task = asyncio.current_task()
        assert task is not None
        self._strangers.pop(task, None)
        await send(sock, pack([True, prove(self._secret, "store server", greeting, client, nonce)], MAX_HELLO_BYTES))
        return client

    async def _answer(self, client: bytes, sock: socket.socket) -> None:
        request = unpack(await receive(sock, MAX_MESSAGE_BYTES))
        number, op = typed(request, 0, int), typed(request, 1, str)
        given = self._answers.setdefault(client, OrderedDict())
        self._answers.move_to_end(client)
        outcome = given.get(number) or await self._outcome(number, op, request[2:])
        if op != "get":  # repeating a get does no harm, and remembering its value would cost memory
            given[number] = outcome
        while len(given) > MAX_ANSWERS_REMEMBERED:
            given.popitem(last=False)
        while len(self._answers) > MAX_CLIENTS_REMEMBERED:
            self._answers.popitem(last=False)
        await send(sock, pack(outcome, MAX_MESSAGE_BYTES + 64))

    async def _outcome(self, number: int, op: str, args: list[Any]) -> list[Any]:
        try:
            return [number, True, await self._carry_out(op, args)]
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as exc:
            return [number, False, str(exc)]

    async def _carry_out(self, op: str, args: list[Any]) -> Any:
        if op == "set":
            key, value = args
            if not isinstance(value, bytes):
                raise ValueError("a value must be bytes")
            self._room_for(key, len(value))
            self._nbytes += len(value) - len(self._values.get(key, b""))
            self._values[key] = value
            for waiter in self._waiters.pop(key, ()):
                if not waiter.done():
                    waiter.set_result(None)
            return None
        if op == "get":
            return await self._get(*args)
        if op == "check":
            return all(key in self._values for key in args[0])
        if op == "add":
            key, amount = args
            self._room_for(key, 0)
            self._counters[key] = self._counters.get(key, 0) + int(amount)
            return self._counters[key]
        if op == "delete":
            self._nbytes -= len(self._values.pop(args[0], b""))
            self._counters.pop(args[0], None)
            return None
        raise ValueError(f"unknown operation {op!r}")

    async def _get(self, key: str, seconds: float) -> list[Any]:
        if key not in self._values and seconds > 0:
            waiter = self._loop.create_future()
            waiters = self._waiters.setdefault(key, [])
            waiters.append(waiter)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(waiter, min(float(seconds), GET_WAIT_S))
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters and self._waiters.get(key) is waiters:
                del self._waiters[key]
        return [key in self._values, self._values.get(key, b"")]

    def _room_for(self, key: Any, nbytes: int) -> None:
        if not isinstance(key, str) or len(key) > 1024:
            raise ValueError("a key must be a string of at most 1024 characters")
        if len(self._values) + len(self._counters) >= MAX_KEYS:
            raise ValueError(f"the store is full ({MAX_KEYS} keys)")
        if self._nbytes + nbytes > MAX_VALUES_BYTES:
            raise ValueError(f"the store is full ({MAX_VALUES_BYTES} bytes)")
