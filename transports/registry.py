"""The table of transports: the one place that names them all.

A transport is a module of this package with the functions of `TransportModule`, and a row in `TRANSPORTS`.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, cast

from hostring.transports.addresses import Address
from hostring.transports.link import Link, LinkKey


@dataclass(frozen=True)
class Listener:
    """A socket at which a rank waits for others, and what it tells them. `remove` deletes what it leaves behind."""

    sock: socket.socket
    address: Address
    remove: Callable[[], None] | None = None


@dataclass(frozen=True)
class Met:
    """What is known when the ranks of a group have met, and links can be made.

    Attributes:
        keys: the links that this rank needs.
        sockets: one for each key, connected and greeted; none for a transport that doesn't listen.
        dialled: the keys whose sockets this rank dialled.
        rank: this rank.
        identity: names this start of the group.
        secret: known to its ranks only.
        deadline: monotonic time.
        leave: gives up what the group needs as long as it lives, and what was opened if it is never formed.
    """

    keys: Collection[LinkKey]
    sockets: Mapping[LinkKey, socket.socket]
    dialled: Collection[LinkKey]
    rank: int
    identity: bytes
    secret: bytes
    deadline: float
    leave: ExitStack


class TransportModule(Protocol):
    """What the module of a transport provides."""

    def unsupported(self) -> str:
        """Why this machine can't have it; empty if it can. Called only if its row names something to use instead."""

    def listen(self, hosts: Sequence[str], port: int) -> list[Listener]:
        """Listen at `hosts`; port 0 picks a free one. Returns nothing if links need no sockets.

        Raises:
            OSError: it can listen at none of them.
        """

    def usable(self, address: Address) -> int | None:
        """How early this rank tries to dial `address`, lowest first; None when it can't."""

    def make_links(self, met: Met) -> Mapping[LinkKey, Link]:
        """The links with all peers. They own their sockets.

        Raises:
            HostringError: a peer does not do its part.
        """


@dataclass(frozen=True)
class Transport:
    """One row.

    Attributes:
        module: in this package. Imported when it is first needed, since some modules are heavy or need one platform.
        ranks_have: what all ranks of a group must have in common. Ranks with the same word reach each other.
        reach: "network", "host" or "process": how far away the peers may be.
        instead: what to use on a machine that doesn't support it; empty if all do.
        encrypts: derives keys from the group's secret, so it needs one.
    """

    module: str
    ranks_have: str
    reach: str = "network"
    instead: str = ""
    encrypts: bool = False

    def load(self) -> TransportModule:
        """The module."""
        return cast(TransportModule, importlib.import_module(f"hostring.transports.{self.module}"))


TRANSPORTS = {
    "auto": Transport("auto", "tcp"),
    "memory": Transport("memory", "memory", "process"),
    "shm": Transport("sharing", "shm", "host", instead="auto"),
    "tcp": Transport("tcp", "tcp"),
    "tls": Transport("tls", "tcp", instead="tcp", encrypts=True),
    "unix": Transport("unix", "unix", "host", instead="tcp"),
}
