"""Messages over raw sockets in coroutines, and how such coroutines end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Any

from hostring.store.protocol import PREFIX, checked_nbytes, framed

MAX_PIECE_BYTES = 1 << 16  # of a message that are read at once


async def send(sock: socket.socket, data: bytes) -> None:
    """Send `data` with its length in front."""
    await asyncio.get_running_loop().sock_sendall(sock, framed(data))


async def receive(sock: socket.socket, limit: int) -> bytes:
    """One message, and not a byte of what comes after it.

    Raises:
        EOFError: the other end closed.
        ValueError: the message is longer than `limit`.
    """
    return await _exactly(sock, checked_nbytes(await _exactly(sock, PREFIX.size), limit))


async def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < nbytes:
        # memory grows with what came, not with what was announced
        more = await loop.sock_recv(sock, min(nbytes - len(data), MAX_PIECE_BYTES))
        if not more:
            raise EOFError("closed in the middle of a message" if data else "closed")
        data += more
    return bytes(data)


def accept_all(listener: socket.socket, welcome: Callable[[socket.socket, str], None]) -> Callable[[], None]:
    """Give every caller at `listener` to `welcome`, as a non-blocking socket and its address for messages.

    By callbacks and not in a coroutine: cancelling `sock_accept` can lose a socket that it has just accepted.

    Returns:
        What ends it.
    """
    loop = asyncio.get_running_loop()

    def look() -> None:
        try:
            for _ in range(64):
                sock, who = listener.accept()
                sock.setblocking(False)
                welcome(sock, str(who or "this host"))
        except BlockingIOError:
            pass
        except OSError:  # out of descriptors, or the caller hung up already: neither lasts
            loop.remove_reader(listener.fileno())
            loop.call_later(0.1, start)

    def start() -> None:
        if listener.fileno() >= 0 and not ended:
            loop.add_reader(listener.fileno(), look)

    def end() -> None:
        ended.append(True)
        loop.remove_reader(listener.fileno())

    ended: list[bool] = []
    start()
    return end


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` until all have ended: wait_for swallows a cancellation that comes together with its result."""
    tasks = list(tasks)
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.05)
    await asyncio.gather(*tasks, return_exceptions=True)  # their exceptions count as seen
