"""A store and its clients, as the tests of stores and of the rendezvous need them."""

from __future__ import annotations

import socket
import time
from typing import Any

from hostring.group.config import Config
from hostring.rendezvous import TcpStore
from hostring.store.protocol import framed, pack, prove, unpack
from hostring.store.server import StoreServer

SECRET = b"known to the group"


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def client(server: StoreServer, secret: bytes = SECRET, **kwargs: Any) -> TcpStore:
    return TcpStore.at("127.0.0.1", server.port, secret=secret, **kwargs)


def hosted(rank: int, port: int, **kwargs: Any) -> Config:
    return Config(rank=rank, world_size=3, store_host="127.0.0.1", store_port=port, secret=SECRET, **kwargs)


class RawClient:
    """A client that numbers its requests itself."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._file = self._sock.makefile("rb")
        greeting, client, nonce = self._read(), b"c" * 16, b"n" * 16
        self._send([client, nonce, prove(SECRET, "store client", greeting, client, nonce)])
        assert unpack(self._read())[0] is True

    def ask(self, number: int, *request: Any) -> Any:
        self._send([number, *request])
        answered, good, value = unpack(self._read())
        assert (answered, good) == (number, True), value
        return value

    def close(self) -> None:
        self._file.close()
        self._sock.close()

    def _send(self, value: Any) -> None:
        self._sock.sendall(framed(pack(value, 1 << 16)))

    def _read(self) -> bytes:
        return self._file.read(int.from_bytes(self._file.read(4), "little"))
