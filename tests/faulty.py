"""Ranks that misbehave at a given byte: what a faulty process, network or stranger does to the links of a group.

Faults strike by position, not by time, so a slow machine changes nothing. The data links of a faulty rank are wrapped
(`FaultyLink`). `faulty_start.py` has what happens before there are links.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hostring.comm import Comm
from hostring.engine.frames import HEADER_BYTES, MAGIC
from hostring.group.config import from_environment
from hostring.group.contract import contract, neighbours
from hostring.group.group import connect
from hostring.transports.link import Link
from hostring.tuning.agreement import open_session

FATAL = ("kill", "stop", "close", "blackhole", "reset", "truncated", "junk", "oversized")
HARMLESS = ("fragments", "slow")
BY_PROCESS = ("kill", "stop", "blackhole", "dead host")
TOPOLOGIES = ("mesh", "ring", "star", "tree")
VARIANTS = {"mesh": "two_shot", "ring": "chain", "star": "stream", "tree": "reduce_broadcast"}
CULPRITS = {  # hub and leaf of the star, root and inner rank of the tree
    3: {"mesh": 1, "ring": 2, "star": 0, "tree": 1},
    4: {"mesh": 2, "ring": 1, "star": 3, "tree": 2},
}
LINGER_NOT = struct.pack("ii", 1, 0)


class Vanished(Exception):
    """Ends the thread of a rank whose process would be gone by now."""


@dataclass
class Fault:
    """What happens to one rank, and at which byte of its data links.

    Attributes:
        at: the fault strikes at the first call on a data link after this many bytes went either way; None for never.
        blackhole: what cuts this rank's network.
    """

    name: str
    at: int | None = None
    blackhole: Callable[[], None] = lambda: None
    links: list[Link] = field(default_factory=list)
    moved: int = 0
    due: bool = False
    struck: bool = False

    def step(self) -> None:
        """Before each call on a data link."""
        if self.at is None or self.struck or self.moved < self.at:
            return
        if self.name in ("truncated", "junk", "oversized"):  # these need a frame to spoil
            self.due = True
        elif self.name in (*FATAL, "dead host"):
            self.strike()

    def strike(self) -> None:
        """Now."""
        self.struck = True
        if self.name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.name == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.name in ("blackhole", "dead host"):
            self.blackhole()
        else:
            vanish(self.links, reset=self.name == "reset")
            raise Vanished


def vanish(links: Sequence[Any], reset: bool = False) -> None:
    """End links as the death of their process does: no goodbye; with a reset when input was left unread."""
    socks = [link.sock if isinstance(link, FaultyLink) else link._sock for link in links]
    for sock in socks:
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        else:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
    for sock in socks:
        sock.close()


class FaultyLink:
    """A link of a rank that has `fault`."""

    def __init__(self, link: Any, fault: Fault) -> None:
        self._link, self._fault = link, fault
        self.peer, self.fileno, self.arm, self.close, self.abort = (
            link.peer,
            link.fileno,
            link.arm,
            link.close,
            link.abort,
        )
        self.sock = link._sock
        self._next_read = 0.0

    def send(self, buffers: Sequence[Any]) -> int:
        fault = self._fault
        fault.step()
        views = [memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes]
        if fault.due and not fault.struck and views and len(views[0]) == HEADER_BYTES and views[0][:4] == MAGIC:
            return self._spoil(views)
        if fault.name == "fragments":
            views = [views[0][:1]] if views else []
        n: int = self._link.send(views)
        fault.moved += n
        return n

    def recv_into(self, view: Any) -> int:
        return self._read(memoryview(view).cast("B"))

    def recv_into_all(self, views: Sequence[Any]) -> int:
        return self._read(
            next((flat for v in views if memoryview(v).nbytes and (flat := memoryview(v).cast("B"))), memoryview(b""))
        )

    def _read(self, view: memoryview) -> int:
        fault = self._fault
        fault.step()
        if fault.name == "fragments":
            view = view[:1]
        if fault.name == "slow":
            if time.perf_counter() < self._next_read:
                return 0
            self._next_read = time.perf_counter() + 0.001
            view = view[:700]
        n: int = self._link.recv_into(view)
        fault.moved += n
        return n

    def _spoil(self, views: list[memoryview]) -> int:
        fault = self._fault
        fault.struck = True
        total = sum(len(v) for v in views)
        if fault.name == "truncated":
            self._link.send([b"".join(views)[: min(total - 1, HEADER_BYTES + 20)]])
            vanish(fault.links)
            raise Vanished
        header = (
            random.Random(7).randbytes(HEADER_BYTES)
            if fault.name == "junk"
            else bytes(views[0][:-8]) + struct.pack("<Q", 1 << 40)
        )
        self._link.send([header, *views[1:]])
        return total


def join(
    rank: int, world_size: int, topology: str, timeout: float, store: Any, fault: Fault | None = None,
    hosts_spec: str | None = None, transport: str = "tcp",
) -> Comm:  # fmt: skip
    """`hostring.init` over TCP, with the links of a faulty rank wrapped."""
    order = "tree" if topology == "tree" else "rank"
    environ = {} if hosts_spec is None else {"HOSTRING_INTERFACE": hosts_spec}
    config = from_environment(
        rank,
        world_size,
        topology=topology,
        order=order,
        transport=transport,
        timeout=timeout,
        store=store,
        environ=environ,
    )
    group = connect(config, neighbours=neighbours(topology, order), contract=contract(topology, order))
    if fault is not None:
        fault.links = group.links
        group.data = {peer: FaultyLink(link, fault) for peer, link in group.data.items()}
    return Comm(open_session(group, topology, order, "float32", timeout))
