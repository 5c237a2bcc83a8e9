"""`init_method="hostring://"`: torch meets wherever hostring does, under mpirun and srun too."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch._C import _distributed_c10d as c10d

import hostring

_HOSTNAME_BYTES = 256


def meet(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """A rendezvous handler of torch's: store, rank and world size from whatever launcher started this process.

    Raises:
        ValueError: the ranks are on several hosts, and MASTER_ADDR doesn't say where rank 0 is.
    """
    with hostring.init() as comm:
        host = os.environ.get("MASTER_ADDR") or _shared_host(comm)
        port = np.zeros(1, np.int64)
        if comm.rank == 0:
            store = c10d.TCPStore(host, 0, comm.world_size, True, wait_for_workers=False)
            port[0] = store.port
        comm.broadcast(port)
        if comm.rank != 0:
            store = c10d.TCPStore(host, int(port[0]), comm.world_size, False)
        comm.barrier()  # nobody leaves before all have what they need
        rank, world_size = comm.rank, comm.world_size
    yield store, rank, world_size


def _shared_host(comm: hostring.Comm) -> str:
    name = np.zeros(_HOSTNAME_BYTES, np.uint8)
    encoded = socket.gethostname().encode()[:_HOSTNAME_BYTES]
    name[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    if len({row.tobytes() for row in comm.all_gather(name)}) > 1:
        raise ValueError(
            "the ranks are on several hosts: set MASTER_ADDR on all of them to an address of rank 0's host"
        )
    return "127.0.0.1"
