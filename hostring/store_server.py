"""The store's server: one daemon thread with an event loop. Rank 0 or the launcher runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from hostring.message import PREFIX, checked_nbytes, framed, pack, prove, proves, unpack
from hostring.store_client import MESSAGE_LIMIT, WAIT_SLICE

log = logging.getLogger("hostring")

HELLO_LIMIT = 256
"""Bytes of a message from someone who has not shown yet that it knows the secret."""

HELLO_SECONDS = 5.0
STRANGERS_LIMIT = 64
CONNECTIONS_LIMIT = 8192
KEYS_LIMIT = 100_000
MEMORY_LIMIT = 1 << 28
"""Bytes of all values together."""

CLIENTS_REMEMBERED = 4096


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
        self.id = os.urandom(16)
        self.port: int = sockets[0].getsockname()[1]
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._nbytes = 0
        self._counters: dict[str, int] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._answers: OrderedDict[bytes, OrderedDict[int, Any]] = OrderedDict()
        self._strangers: OrderedDict[asyncio.StreamWriter, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(list(sockets), ready), name="hostring-store", daemon=True)
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
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            ready.set()
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _serve(self, sockets: list[socket.socket], ready: threading.Event) -> None:
        servers = [await asyncio.start_server(self._client, sock=sock, limit=1 << 16) for sock in sockets]
        ready.set()
        await self._stop.wait()
        for server in servers:
            server.close()
        await asyncio.sleep(0)  # a connection that is being accepted becomes a task now
        while self._tasks:  # once is not enough: wait_for swallows a cancellation that comes together with its result
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=0.05)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(server.wait_closed() for server in servers)), 1.0)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > CONNECTIONS_LIMIT:
                return
            client = await self._welcome(reader, writer)
            while client is not None:
                await self._answer(client, reader, writer)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # the server closes, or the client is gone or talks nonsense; it can't expect an answer
        finally:
            self._tasks.discard(task)
            self._strangers.pop(writer, None)
            writer.transport.abort() if self._stop.is_set() else writer.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        """Challenge whoever connects. Returns the client's id, or None for a stranger."""
        if len(self._strangers) >= STRANGERS_LIMIT:  # the one that has kept silent longest makes room
            self._strangers.popitem(last=False)[0].transport.abort()
        self._strangers[writer] = None
        greeting = pack({"hostring": "store 1", "server": self.id, "nonce": os.urandom(16)}, HELLO_LIMIT)
        writer.write(framed(greeting))
        who = writer.get_extra_info("peername")
        try:
            hello = unpack(await asyncio.wait_for(_read(reader, HELLO_LIMIT), HELLO_SECONDS))
            client, nonce, proof = hello
            if not isinstance(client, bytes) or not isinstance(nonce, bytes):
                raise ValueError("no hello of the store's")
        except (ValueError, TypeError, EOFError, asyncio.TimeoutError) as exc:
            log.info("hostring: the store dropped a stranger at %s: %s", who, exc or type(exc).__name__)
            return None
        finally:
            self._strangers.pop(writer, None)
        if not proves(proof, self._secret, "store client", greeting, client, nonce):
            log.warning("hostring: the store refused %s: it does not know the secret", who)
            writer.write(framed(pack([False, "the secrets differ (HOSTRING_SECRET)"], HELLO_LIMIT)))
            return None
        writer.write(framed(pack([True, prove(self._secret, "store server", greeting, client, nonce)], HELLO_LIMIT)))
        return client

    async def _answer(self, client: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = unpack(await _read(reader, MESSAGE_LIMIT))
        if not isinstance(request, list) or len(request) < 3 or not isinstance(request[0], int):
            raise ValueError("no request of the store's")
        number, op, *args = request
        given = self._answers.setdefault(client, OrderedDict())
        self._answers.move_to_end(client)
        if number not in given:
            try:
                outcome = [number, True, await self._carry_out(op, args)]
            except (ValueError, TypeError, AttributeError) as exc:
                outcome = [number, False, str(exc)]
            if op == "get":  # repeating it does no harm, remembering its value would cost memory
                writer.write(framed(pack(outcome, MESSAGE_LIMIT + 64)))
                return
            given[number] = outcome
        writer.write(framed(pack(given[number], MESSAGE_LIMIT + 64)))
        while len(given) > 16:
            given.popitem(last=False)
        while len(self._answers) > CLIENTS_REMEMBERED:
            self._answers.popitem(last=False)

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
                await asyncio.wait_for(waiter, min(float(seconds), WAIT_SLICE))
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters and self._waiters.get(key) is waiters:
                del self._waiters[key]
        return [key in self._values, self._values.get(key, b"")]

    def _room_for(self, key: Any, nbytes: int) -> None:
        if not isinstance(key, str) or len(key) > 1024:
            raise ValueError("a key must be a string of at most 1024 characters")
        if len(self._values) + len(self._counters) >= KEYS_LIMIT:
            raise ValueError(f"the store is full ({KEYS_LIMIT} keys)")
        if self._nbytes + nbytes > MEMORY_LIMIT:
            raise ValueError(f"the store is full ({MEMORY_LIMIT} bytes)")


async def _read(reader: asyncio.StreamReader, limit: int) -> bytes:
    return await reader.readexactly(checked_nbytes(await reader.readexactly(PREFIX.size), limit))
