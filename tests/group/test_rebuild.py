"""A group is made whole again after a rank is gone: with the survivors alone, or with a process that comes back."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from ranks import side_by_side

import hostring
from hostring.rendezvous import MemoryStore


def contribution(rank: int) -> np.ndarray[Any, Any]:
    return np.arange(5, dtype=np.float32) + 10.0**rank


def vanish(comm: hostring.Comm) -> None:
    """End this rank's links as a killed process would: without a word."""
    comm.session.group.abort()
    comm.session.group.close()


@pytest.mark.parametrize("transport", ["tcp", "memory"])
@pytest.mark.parametrize(("world_size", "dead"), [(3, 1), (4, 2), (3, 2), (2, 1)])
@pytest.mark.parametrize("topology", ["mesh", "ring"])
def test_survivors_go_on_alone_in_their_old_order(transport: str, world_size: int, dead: int, topology: str) -> None:
    store, ready = MemoryStore(), threading.Barrier(world_size)

    def body(rank: int) -> Any:
        comm = hostring.init(rank, world_size, store=store, transport=transport, topology=topology, timeout=15)
        comm.all_reduce(contribution(rank))
        ready.wait(15)
        if rank == dead:
            vanish(comm)
            return None
        with pytest.raises(hostring.HostringError) as failure:
            comm.all_reduce(contribution(rank))
        assert failure.value.rank == dead
        with comm.rebuild(timeout=15) as again:
            return again.rank, again.world_size, again.all_reduce(contribution(rank))

    left = [r for r in range(world_size) if r != dead]
    expected = np.zeros(5, np.float32) + contribution(left[0])
    for r in left[1:]:
        expected = expected + contribution(r)
    results = side_by_side([lambda r=r: body(r) for r in range(world_size)])
    for new_rank, old_rank in enumerate(left):
        got = results[old_rank]
        assert not isinstance(got, BaseException), results
        assert got[:2] == (new_rank, world_size - 1)
        np.testing.assert_array_equal(got[2], expected)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_comes_back_where_it_stood(dead: int) -> None:
    store, ready = MemoryStore(), threading.Barrier(3)
    gone = threading.Event()

    def body(who: int) -> Any:
        if who == 3:
            assert gone.wait(20)
            with hostring.init(dead, 3, store=store, transport="tcp", timeout=15, rejoin=True) as comm:
                return comm.rank, comm.all_reduce(contribution(comm.rank))
        comm = hostring.init(who, 3, store=store, transport="tcp", timeout=15)
        comm.barrier()
        ready.wait(15)
        if who == dead:
            vanish(comm)
            gone.set()
            return None
        with pytest.raises(hostring.HostringError):
            comm.all_reduce(contribution(who))
        with comm.rebuild(min_ranks=3, timeout=15) as comm:
            return comm.rank, comm.all_reduce(contribution(comm.rank))

    results = side_by_side([lambda r=r: body(r) for r in range(4)])
    expected = contribution(0) + contribution(1) + contribution(2)
    for who in {0, 1, 2, 3} - {dead}:
        got = results[who]
        assert not isinstance(got, BaseException), got
        assert got[0] == (dead if who == 3 else who)
        np.testing.assert_array_equal(got[1], expected)


def test_too_few_ranks_is_an_error_that_counts_them() -> None:
    store, ready = MemoryStore(), threading.Barrier(2)

    def body(rank: int) -> Any:
        comm = hostring.init(rank, 2, store=store, transport="tcp", timeout=15)
        comm.barrier()
        ready.wait(15)
        if rank == 1:
            vanish(comm)
            return None
        with pytest.raises(hostring.HostringError):
            comm.barrier()
        with pytest.raises(hostring.RendezvousError, match="1 here, at least 2 needed"):
            comm.rebuild(min_ranks=2, timeout=0.5)
        with comm.rebuild(timeout=5) as alone:  # it may be tried again
            assert (alone.rank, alone.world_size) == (0, 1)
        return "refused"

    assert side_by_side([lambda r=r: body(r) for r in range(2)])[0] == "refused"


def test_a_group_without_a_store_says_so(run_ranks: Any) -> None:
    def body(comm: hostring.Comm) -> None:
        part = comm.split(0)
        assert part is not None
        with pytest.raises(ValueError, match="rebuild the group that it was split from"):
            part.rebuild()
        part.close()
        comm.barrier()

    run_ranks(2, body)
