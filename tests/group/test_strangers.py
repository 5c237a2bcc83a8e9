"""Fifty strangers dial the store and every rank at once, before the ranks do: none gets in, no rank waits."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from ranks import side_by_side, successes

import hostring
from hostring.group import greeting
from hostring.group.connecting import Connecting
from hostring.group.handshake import dial
from hostring.rendezvous import TcpStore
from hostring.store.protocol import framed, pack, prove
from hostring.store.server import StoreServer
from hostring.transports.tcp import listen_at

SECRET = b"of the group"
WORLD_SIZE = 3
STRANGERS = 50
KINDS = ("silent", "junk", "replay", "wrong secret")


class Crowd:
    """Strangers of all kinds. Each stays as long as it is let."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        self.recorded: list[bytes] = []
        self.threads: list[threading.Thread] = []
        self.got_in: list[str] = []

    def visit(self, address: tuple[Any, ...], say: Any) -> None:
        for k in range(STRANGERS):
            kind = KINDS[k % len(KINDS)]
            sock = socket.create_connection(address[:2], timeout=20)
            self.sockets.append(sock)
            if kind == "junk":
                sock.sendall(
                    (b"\xff\xff\xff\xff", b"\5\0\0\0junk!", b"GET / HTTP/1.1\r\n\r\n", framed(os.urandom(60)))[
                        k // 4 % 4
                    ]
                )
            elif kind == "replay" and self.recorded:
                sock.sendall(b"".join(self.recorded))
            elif kind == "wrong secret":
                thread = threading.Thread(target=self._guard, args=(say, sock), daemon=True)
                thread.start()
                self.threads.append(thread)

    def _guard(self, say: Any, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError, hostring.HandshakeError, StopIteration):
            say(sock)
            self.got_in.append("with a wrong secret")

    def leave(self) -> None:
        for sock in self.sockets:
            sock.close()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


def read(sock: socket.socket) -> bytes:
    def exactly(n: int) -> bytes:
        data = b""
        while len(data) < n:
            more = sock.recv(n - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    return exactly(int.from_bytes(exactly(4), "little"))


def to_a_store(sock: socket.socket) -> None:
    greeting = read(sock)
    sock.sendall(
        framed(pack([b"c" * 16, b"n" * 16, prove(b"wrong", "store client", greeting, b"c" * 16, b"n" * 16)], 999))
    )
    if not msgpack.unpackb(read(sock))[0]:
        raise EOFError


def to_a_rank(hello: Any, peer: int) -> Any:
    """Knows everything about the group but its secret."""

    def say(sock: socket.socket) -> None:
        protocol = dial(hello, peer, b"wrong")
        out = next(protocol)
        while True:
            sock.sendall(framed(out))
            out = protocol.send(read(sock))

    return say


def start(port: int) -> float:
    """Form a group, use it, close it. Returns the seconds until it was formed, of the slowest rank."""

    def body(rank: int) -> float:
        store = TcpStore.at("127.0.0.1", port, secret=SECRET, deadline=time.monotonic() + 30)
        try:
            started = time.monotonic()
            with hostring.init(rank, WORLD_SIZE, store=store, transport="tcp", timeout=30) as comm:
                seconds = time.monotonic() - started
                assert comm.all_reduce(np.array([10.0**rank]))[0] == 111.0
                assert len(comm.session.group.links) == 3 * (WORLD_SIZE - 1)
            return seconds
        finally:
            store.close()

    return max(successes(side_by_side([lambda r=r: body(r) for r in range(WORLD_SIZE)])))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    monkeypatch.setenv("HOSTRING_SECRET", SECRET.decode())
    running = StoreServer([listen_at("127.0.0.1", 0)], SECRET)
    yield running
    running.close()


def test_fifty_strangers_of_every_kind_at_every_door(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd()
    run, send = Connecting.run, greeting.send

    async def recorded(sock: socket.socket, data: bytes, until: float) -> None:
        crowd.recorded.append(data)
        await send(sock, data, until)

    with monkeypatch.context() as patch:
        patch.setattr(greeting, "send", recorded)
        start(server.port)
    crowd.recorded = crowd.recorded[:4]
    alone = min(start(server.port) for _ in range(2))

    def beset(self: Connecting, *until: Any) -> None:
        mine = self.greeted.hello
        for listener in self.listeners:
            other = (mine.rank + 1) % WORLD_SIZE
            stranger = replace(mine, rank=other, kind="control", session=b"s" * 16)
            crowd.visit(listener.getsockname(), to_a_rank(stranger, mine.rank))
        run(self, *until)

    monkeypatch.setattr(Connecting, "run", beset)
    crowd.visit(("127.0.0.1", server.port), to_a_store)
    try:
        together = start(server.port)
    finally:
        crowd.leave()
    assert len(crowd.sockets) >= STRANGERS * (1 + WORLD_SIZE)
    assert crowd.got_in == []
    assert together < alone + 3.0
