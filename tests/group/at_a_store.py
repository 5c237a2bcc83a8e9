"""A store and its clients, as the tests of stores and of the rendezvous need them."""

from __future__ import annotations

import time
from typing import Any

from hostring.group.config import Config
from hostring.rendezvous import TcpStore
from hostring.store.server import StoreServer

SECRET = b"known to the group"


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def client(server: StoreServer, secret: bytes = SECRET, **kwargs: Any) -> TcpStore:
    return TcpStore.at("127.0.0.1", server.port, secret=secret, **kwargs)


def hosted(rank: int, port: int, **kwargs: Any) -> Config:
    return Config(rank=rank, world_size=3, store_host="127.0.0.1", store_port=port, secret=SECRET, **kwargs)
