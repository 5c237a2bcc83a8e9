"""`init_method="hostring://"`: torch uses the rendezvous of `hostring.init`, also under mpirun and srun."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

from torch._C import _distributed_c10d as c10d

import hostring


def meet(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """torch's rendezvous handler: store, rank and world size, from the launcher that started this process.

    Raises:
        ValueError: the ranks are on several hosts, and MASTER_ADDR doesn't say where rank 0 is.
    """
    with hostring.init() as comm:
        host = os.environ.get("MASTER_ADDR") or _shared_host(comm)
        if comm.rank == 0:
            store = c10d.TCPStore(host, 0, comm.world_size, True, wait_for_workers=False)
            comm.broadcast_bytes(str(store.port).encode())
        else:
            store = c10d.TCPStore(host, int(comm.broadcast_bytes()), comm.world_size, False)
        comm.barrier()  # no rank leaves before all have the port
        rank, world_size = comm.rank, comm.world_size
    yield store, rank, world_size


def _shared_host(comm: hostring.Comm) -> str:
    if len(set(comm.gather_bytes(socket.gethostname().encode()))) > 1:
        raise ValueError(
            "the ranks are on several hosts: set MASTER_ADDR on all of them to an address of rank 0's host"
        )
    return "127.0.0.1"
