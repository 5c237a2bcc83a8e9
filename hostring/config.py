"""What `init` has to know before the ranks can meet, and where it reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Config:
    """How one rank finds the others.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        local_rank: this rank among those of its host, where the launcher says so.
        name: of the group, part of every key in the store.
        topology, order, transport: as in `hostring.init`.
        timeout: seconds for start-up, and for an operation unless it says otherwise.
        interface: see `hostring.addresses.choose`.
        secret: shared by the group. Never logged.
        store_host, store_port: where the store is, when there is one to connect to.
        hosts_store: rank 0 of this group runs the store there; otherwise somebody else does.
        torch_store: the store there is torch's.
        meeting_file: where rank 0 writes the store's address, when nobody gave one.
        store: a store object that the caller brought.
        ring: the neighbours, when there is no store.
        restarts: how often the launcher started this group anew.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    name: str = "world"
    topology: str = "auto"
    order: str = "rank"
    transport: str = "auto"
    timeout: float = 120.0
    interface: str | None = None
    secret: bytes = field(default=b"", repr=False)
    store_host: str | None = None
    store_port: int = 0
    hosts_store: bool = True
    torch_store: bool = False
    meeting_file: str | None = None
    store: Any = field(default=None, repr=False)
    ring: Any = None
    restarts: str = "0"


def from_environment(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    topology: str | None = None,
    order: str | None = None,
    transport: str | None = None,
    timeout: float | None = None,
    store: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Thin for now: arguments and torchrun's variables."""
    rank = int(environ.get("RANK", 0)) if rank is None else rank
    world_size = int(environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
    return Config(
        rank=rank,
        world_size=world_size,
        topology=topology or environ.get("HOSTRING_TOPOLOGY", "auto"),
        order=order or environ.get("HOSTRING_ORDER", "rank"),
        transport=transport or environ.get("HOSTRING_TRANSPORT", "auto"),
        timeout=timeout if timeout is not None else float(environ.get("HOSTRING_TIMEOUT", "120")),
        interface=environ.get("HOSTRING_INTERFACE"),
        secret=environ.get("HOSTRING_SECRET", "").encode(),
        store_host=environ.get("MASTER_ADDR"),
        store_port=int(environ.get("MASTER_PORT", 29500)),
        store=store,
    )
