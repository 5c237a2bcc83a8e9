"""An adapter that raises in the middle of a call: the other ranks, which may wait in that call, hear of that error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hostring
from hostring.arrays.adapter import Adapter


class Broken:
    """An array whose memory can't be copied: on the way to the host, or on the way back."""

    dtype = np.dtype(np.float32)

    def __init__(self, way: str, *shape: int) -> None:
        self.way, self.shape = way, shape


class BrokenAdapter(Adapter):
    def stage(self, x: Broken, host: np.ndarray) -> None:
        if x.way == "stage":
            raise ZeroDivisionError("the cable is unplugged")
        host[...] = 1.0

    def unstage(self, host: np.ndarray, x: Broken, shape: tuple[int, ...] | None = None) -> Any:
        raise ZeroDivisionError("the cable is unplugged")


hostring.register_adapter(Broken, BrokenAdapter())

CALLS = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce_coalesced": lambda comm, x: comm.all_reduce_coalesced([x, np.ones(2, np.float32)]),
    "reduce": lambda comm, x: comm.reduce(x, 1),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "gather": lambda comm, x: comm.gather(x, 1),
    "scatter": lambda comm, x: comm.scatter(x, 1, out=None if comm.rank == 1 else np.ones(2, np.float32)),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "later": lambda comm, x: comm.all_reduce(x, async_op=True).wait(),
}


@pytest.mark.parametrize("way", ["stage", "unstage"])
@pytest.mark.parametrize("name", [*CALLS, "broadcast"])
def test_what_an_adapter_raises_reaches_all_ranks(run_ranks: Any, name: str, way: str) -> None:
    """By the next call at the latest: a rank that needs nothing from rank 1 may have returned from this one."""

    def body(comm: hostring.Comm) -> bool:
        x = Broken(way, 3, 2) if comm.rank == 1 else np.ones((3, 2), np.float32)

        def call_and_go_on() -> None:
            comm.barrier()  # all ranks have started
            if name == "broadcast":
                comm.broadcast(x, 0 if way == "unstage" else 1)
            else:
                CALLS[name](comm, x)
            comm.barrier()

        words = (
            "cable is unplugged"
            if comm.rank == 1
            else "rank 1 left a call by ZeroDivisionError: the cable is unplugged"
        )
        with pytest.raises(ZeroDivisionError if comm.rank == 1 else hostring.HostringError, match=words):
            call_and_go_on()
        return True

    assert run_ranks(3, body) == [True] * 3


@pytest.mark.parametrize("way", ["stage", "unstage"])
def test_what_an_adapter_raises_in_a_message_reaches_the_other_rank(run_ranks: Any, way: str) -> None:
    def body(comm: hostring.Comm) -> bool:
        def exchange() -> None:
            comm.barrier()
            if (comm.rank == 1) == (way == "stage"):
                comm.send(Broken(way, 2) if comm.rank == 1 else np.ones(2, np.float32), 1 - comm.rank)
            else:
                comm.recv(Broken(way, 2) if comm.rank == 1 else np.ones(2, np.float32), 1 - comm.rank)
            comm.barrier()

        with pytest.raises(ZeroDivisionError if comm.rank == 1 else hostring.HostringError, match="cable is unplugged"):
            exchange()
        return True

    assert run_ranks(2, body) == [True, True]
