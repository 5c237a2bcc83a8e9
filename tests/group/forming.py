"""Groups formed side by side in threads, as tests of the start need them."""

from __future__ import annotations

import glob
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ranks import free_port, side_by_side

from hostring.group.config import Config
from hostring.group.group import Group, connect
from hostring.rendezvous import MemoryStore

CONTRACT = {"order": "rank"}
KINDS = ("data", "control", "p2p")


def everyone(rank: int, world_size: int) -> set[int]:
    return set(range(world_size)) - {rank}


def next_one(rank: int, world_size: int) -> set[int]:
    return {(rank + 1) % world_size}


def form(
    configs: Sequence[Config], neighbours: Any = everyone, contracts: Sequence[dict[str, Any]] | None = None
) -> list[Any]:
    """Connect all ranks; groups, or what they raised."""
    contracts = contracts or [CONTRACT] * len(configs)
    pairs = zip(configs, contracts, strict=True)
    return side_by_side([lambda c=c, k=k: connect(c, neighbours=neighbours, contract=k) for c, k in pairs])


def configs(world_size: int, transport: str = "tcp", **changes: Any) -> list[Config]:
    base = Config(world_size=world_size, transport=transport, timeout=20.0, store=MemoryStore(), secret=b"shared")
    return [replace(base, rank=r, **changes) for r in range(world_size)]


def hosted(world_size: int, host: str = "127.0.0.1", **changes: Any) -> list[Config]:
    return configs(world_size, store=None, store_host=host, store_port=free_port(), **changes)


def talk(groups: Sequence[Group]) -> None:
    """Each link of each kind carries a word of its own, both ways."""
    for group in groups:
        for kind in KINDS:
            for peer, link in getattr(group, kind).items():
                assert link.peer == peer
                assert link.send([f"{kind} {group.rank}>{peer}.".encode()]) > 0
    for group in groups:
        for kind in KINDS:
            for peer, link in getattr(group, kind).items():
                expected = f"{kind} {peer}>{group.rank}.".encode()
                got = bytearray()
                end = time.monotonic() + 10
                while len(got) < len(expected) and time.monotonic() < end:
                    chunk = bytearray(len(expected) - len(got))
                    got += chunk[: link.recv_into(chunk)]
                assert bytes(got) == expected


def close_all(groups: Sequence[Any]) -> None:
    for group in groups:
        if isinstance(group, Group):
            group.close()


def left_behind() -> tuple[int, int, list[str]]:
    sockets = glob.glob(os.path.join(tempfile.gettempdir(), "hostring-*", "s"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), sockets
