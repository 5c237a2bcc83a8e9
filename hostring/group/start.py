"""One start of a rank: whether it can be what was asked for, until when, and what is to be given up again."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Any

from hostring.group.config import Config
from hostring.group.rendezvous import Progress

TRANSPORTS = ("auto", "memory", "shm", "tcp", "tls", "unix")


def check(config: Config) -> None:
    """Raises: ValueError, when `config` can't be carried out."""
    if config.transport not in TRANSPORTS:
        raise ValueError(f"transport={config.transport!r} is none of {', '.join(TRANSPORTS)}")
    if config.transport in ("shm", "tls") and (why := _unsupported(config.transport)):
        raise ValueError(
            f"transport={config.transport!r}: {why}; use transport='{'auto' if config.transport == 'shm' else 'tcp'}'"
        )
    if config.transport == "tls" and not config.secret:
        raise ValueError("transport='tls' needs a secret to derive its key from: set HOSTRING_SECRET, or join by token")
    if not 0 <= config.rank < config.world_size:
        raise ValueError(f"rank {config.rank} is not in 0…{config.world_size - 1} (world_size {config.world_size})")
    if config.ring is not None and config.transport not in ("auto", "tcp", "tls"):
        raise ValueError(f"RING_CONFIG gives TCP addresses, which transport={config.transport!r} has no use for")


def _unsupported(transport: str) -> str:
    if transport == "tls":
        from hostring.transports import tls

        return tls.unsupported()
    from hostring.transports import shm

    return shm.unsupported()


class Start:
    """What the steps of one start share, from the first listener to the last link.

    Attributes:
        transport: "memory", "unix", "shm" or "tcp": what kind of address this rank has.
        shares: whether it wants to share memory with ranks of its host.
        deadline: monotonic time.
        listeners: open until all links are there.
        undo: closes what was opened on the way, unless all goes well.
        leave: gives up what the group needs as long as it lives.
    """

    def __init__(self, config: Config, contract: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        self.config = config
        self.rank, self.world_size = config.rank, config.world_size
        self.contract = {**contract, "encrypted": config.transport == "tls"}
        self.transport = "tcp" if config.transport in ("auto", "tls") else config.transport
        self.shares = config.transport in ("auto", "shm") and not _unsupported("shm")
        self.deadline = time.monotonic() + config.timeout
        self.progress = Progress(config.rank, self.deadline)
        self.listeners: list[socket.socket] = []
        self.undo, self.leave = undo, contextlib.ExitStack()
        undo.callback(self.leave.close)
