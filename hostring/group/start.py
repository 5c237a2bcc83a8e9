"""One start of a rank: whether it can be what was asked for, until when, and what must be given up again."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from hostring.group.config import Config
from hostring.group.peer_info import this_peer
from hostring.group.waiting import Waiting
from hostring.store.protocol import pack
from hostring.transports.registry import TRANSPORTS, Transport, TransportModule

MAX_CONTRACT_BYTES = 1024
"""So that it fits into a hello."""


class Start:
    """What the steps of one start share, from the first listener to the last link.

    Attributes:
        row, transport: the transport's row in the table, and its module.
        contract: what all ranks must agree on; the caller's, and what follows from the transport and the machine.
        deadline: monotonic time.
        me: this rank, without addresses.
        listeners: the sockets at which this rank waits; open until all links are there.
        listening: closes them.
        undo: closes what was opened on the way, unless all goes well.
        leave: gives up what the group needs as long as it lives.

    Raises:
        ValueError: `config` can't be carried out, or the contract is too large.
    """

    def __init__(self, config: Config, contract: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        self.row, self.transport = _transport(config)
        if not 0 <= config.rank < config.world_size:
            raise ValueError(f"rank {config.rank} is not in 0…{config.world_size - 1} (world_size {config.world_size})")
        self.config = config
        self.rank, self.world_size = config.rank, config.world_size
        self.contract = {**contract, "encrypted": self.row.encrypts, "byte_order": sys.byteorder}
        pack(self.contract, MAX_CONTRACT_BYTES)
        self.deadline = time.monotonic() + config.timeout
        self.waiting = Waiting(config.rank, self.deadline)
        self.me = this_peer([])
        self.listeners: list[socket.socket] = []
        self.listening, self.leave = contextlib.ExitStack(), contextlib.ExitStack()
        self.undo = undo
        undo.callback(self.leave.close)
        undo.callback(self.listening.close)


def _transport(config: Config) -> tuple[Transport, TransportModule]:
    name = config.transport
    if name not in TRANSPORTS:
        raise ValueError(f"transport={name!r} is none of {', '.join(TRANSPORTS)}")
    row = TRANSPORTS[name]
    module = row.load()
    if row.instead and (why := module.unsupported()):
        raise ValueError(f"transport={name!r}: {why}; use transport={row.instead!r}")
    if row.encrypts and not config.secret:
        raise ValueError(
            f"transport={name!r} needs a secret to derive its key from: set HOSTRING_SECRET, or join by token"
        )
    if config.ring is not None and row.reach != "network":
        raise ValueError(f"RING_CONFIG gives TCP addresses, which transport={name!r} has no use for")
    return row, module
