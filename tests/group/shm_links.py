"""Links of shared memory between two ends of one process, and what of them could be left behind."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from link_ends import LEFT, RIGHT, Pair

from hostring.transports import memory_order, sharing
from hostring.transports.mapping import PAGE
from hostring.transports.shm import ShmLink

pytestmark = pytest.mark.skipif(bool(memory_order.unsupported()), reason=memory_order.unsupported())
DEADLINE = 20.0
DATA = (RIGHT, "data")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    socks = socket.socketpair()
    for sock in socks:
        sock.setblocking(False)
    return socks


def shared(capacity: int) -> tuple[dict[sharing.Wire, ShmLink], dict[sharing.Wire, ShmLink]]:
    """What `share` gives two ranks that share one link."""
    dialled, accepted = socket_pair()
    end = time.monotonic() + DEADLINE
    theirs: list[dict[sharing.Wire, ShmLink]] = []
    other = threading.Thread(target=lambda: theirs.append(sharing.share({(LEFT, "data"): accepted}, [], end, capacity)))
    other.start()
    ours = sharing.share({DATA: dialled}, [DATA], end, capacity)
    other.join()
    if not ours:
        dialled.close()
    if not theirs[0]:
        accepted.close()
    return ours, theirs[0]


def shm_pair(capacity: int = PAGE) -> Pair:
    ours, theirs = shared(capacity)
    return ours[DATA], theirs[LEFT, "data"]


def footprint() -> tuple[int, int, list[str]]:
    """Descriptors, mappings, and names of ours that could outlive us."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        mapped = sum("memfd:hostring" in line or "/dev/shm" in line for line in file)
    return (
        len(os.listdir("/proc/self/fd")),
        mapped,
        sorted(name for name in os.listdir("/dev/shm") if "tmp" in name or "hostring" in name),
    )
