"""hostring: vendor-agnostic, host-staged collective communication with the same bits on every rank."""

from __future__ import annotations

from typing import Any

from . import bootstrap
from .comm import Comm, contract, neighbours
from .config import from_environment
from .errors import (
    CollectiveMismatch,
    GroupClosedError,
    HandshakeError,
    HostringError,
    OperationTimeout,
    PeerLostError,
    ProtocolError,
    RendezvousError,
)
from .staging import Adapter, register_adapter
from .work import Work

__version__ = "0.1.0"
__all__ = [
    "Adapter",
    "CollectiveMismatch",
    "Comm",
    "GroupClosedError",
    "HandshakeError",
    "HostringError",
    "OperationTimeout",
    "PeerLostError",
    "ProtocolError",
    "RendezvousError",
    "Work",
    "init",
    "register_adapter",
]


def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    topology: str | None = None,
    order: str | None = None,
    transport: str | None = None,
    timeout: float | None = None,
    store: Any = None,
) -> Comm:
    """Join the group of ranks that this process was started for.

    What is not given is read from `RING_CONFIG`, then from the launcher's variables (hostring launch, torchrun, mpirun,
    srun); with none of them, the group has this one rank, and every collective is the identity.

    Args:
        rank: this process's index, 0 … world_size - 1.
        world_size: number of ranks.
        topology: auto, mesh, ring, star or tree. Never changes a bit of a result; "auto" picks by size.
        order: rank, ring or tree, the declared fold order, part of the group's contract.
        transport: auto, tcp, unix, or memory for ranks that are threads of one process.
        timeout: seconds for start-up, and for each operation unless it says otherwise. 120 by default.
        store: a rendezvous store to use instead: torch's, or `hostring.rendezvous.MemoryStore` for threads.

    Raises:
        ValueError: names that are unknown or don't go together; nothing was opened.
        RendezvousError, HandshakeError: the ranks did not find each other, or don't agree. The message names who.
    """
    config = from_environment(rank, world_size, topology=topology, order=order, transport=transport, timeout=timeout, store=store)
    group = bootstrap.connect(
        config, neighbours=neighbours(config.topology, config.order), contract=contract(config.topology, config.order)
    )
    return Comm(group, topology=config.topology, order=config.order, timeout=config.timeout)
