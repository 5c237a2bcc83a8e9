"""What carries the links of a group, and what its all-reduce gives."""

from __future__ import annotations

import socket
from typing import Any

from oracle import bits, fold_in_order, rank_distinct

import hostring
from hostring.transports import shm

SIZES = (0, 1, 7, 1000, 20_000, 100_003)


def carriers(comm: hostring.Comm) -> dict[str, dict[int, str]]:
    """What carries each link: "shm", or the family of its socket."""

    def of(link: Any) -> str:
        return "shm" if isinstance(link, shm.ShmLink) else "unix" if link._sock.family == socket.AF_UNIX else "tcp"

    return {
        kind: {peer: of(link) for peer, link in sorted(getattr(comm.session.group, kind).items())}
        for kind in ("data", "control", "p2p")
    }


def reduced(comm: hostring.Comm) -> list[bytes]:
    return [bits(comm.all_reduce(rank_distinct(comm.world_size, n)[comm.rank].copy())) for n in SIZES]


def expected(world_size: int, order: str = "rank") -> list[bytes]:
    return [bits(fold_in_order(order, rank_distinct(world_size, n))) for n in SIZES]
