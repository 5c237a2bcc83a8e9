"""Groups whose ranks share memory: with the same bits, and leaving nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from carried_groups import carriers, expected, reduced
from oracle import bits, fold_in_order, rank_distinct
from ranks import in_processes, in_threads
from shm_links import footprint

import hostring
from hostring.transports import memory_order

pytestmark = pytest.mark.skipif(bool(memory_order.unsupported()), reason=memory_order.unsupported())

DEADLINE = 30.0


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize(
    ("topology", "order"),
    [("mesh", "rank"), ("ring", "rank"), ("ring", "ring"), ("star", "rank"), ("tree", "tree"), ("auto", "rank")],
)
def test_all_reduce_gives_the_declared_bits(world_size: int, topology: str, order: str) -> None:
    for got in in_threads(world_size, reduced, transport="shm", topology=topology, order=order):
        assert got == expected(world_size, order)


def every_collective(comm: hostring.Comm) -> list[bytes]:
    rank, n = comm.rank, comm.world_size
    x = rank_distinct(n, 3000)[rank]
    b = x.astype(ml_dtypes.bfloat16)
    work = comm.all_reduce(x.copy(), async_op=True)
    gathered = comm.gather(x, root=1)
    results = [
        work.wait(),
        comm.all_reduce(b.copy()),
        comm.broadcast(x.copy(), root=n - 1),
        comm.all_gather(x),
        comm.reduce_scatter(x),
        np.empty(0, np.float32) if gathered is None else gathered,
        comm.all_to_all(x),
        comm.decide(x, lambda stacked: stacked[-1] * 2),
    ]
    comm.barrier()
    large, into = np.full(700_000, rank, np.float32), np.empty(700_000, np.float32)
    sent = comm.send(large, dst=(rank + 1) % n, async_op=True)  # more than a ring holds, all ranks at once
    results.append(comm.recv(into, src=(rank - 1) % n))
    sent.wait()
    part = comm.split(rank % 2)
    assert part is not None
    results.append(part.all_reduce(x.copy()))
    part.close()
    return [np.ascontiguousarray(r).tobytes() for r in results]


def test_every_operation_gives_the_bits_of_tcp() -> None:
    assert in_threads(3, every_collective, transport="shm") == in_threads(3, every_collective, transport="tcp")


def in_a_process(comm: hostring.Comm) -> Any:
    large = rank_distinct(comm.world_size, 1_500_001)  # 6 MB: three times what a ring holds
    return (
        carriers(comm),
        reduced(comm),
        bits(comm.all_reduce(large[comm.rank].copy())) == bits(fold_in_order("rank", large)),
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_of_one_host_share_memory_by_themselves(world_size: int) -> None:
    for rank, (kind, got) in enumerate(in_processes(world_size, in_a_process)):
        assert kind == "ok", got
        links, results, large = got
        others = [r for r in range(world_size) if r != rank]
        assert links == {
            "data": dict.fromkeys(others, "shm"),
            "control": dict.fromkeys(others, "unix"),
            "p2p": dict.fromkeys(others, "shm"),
        }
        assert results == expected(world_size)
        assert large


def test_closed_groups_leave_nothing() -> None:
    in_threads(3, reduced, transport="auto")
    before = footprint()
    for _ in range(3):
        in_threads(3, reduced, transport="auto")
    assert footprint() == before


RANK = """
    import os, sys, time
    import numpy as np, hostring
    comm = hostring.init(1, 2, timeout=30.0)
    x = np.ones(1000, np.float32)
    comm.all_reduce(x)
    print("ready", flush=True)
    sys.stdin.readline()
    comm.all_reduce(np.ones(1_000_000, np.float32))
    time.sleep(60)
"""


@pytest.mark.faults
def test_a_killed_rank_is_named_and_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    lose_a_rank()  # what is opened once in a process is open now
    before = footprint()
    lose_a_rank()
    assert footprint() == before


def lose_a_rank() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RANK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        comm = hostring.init(0, 2, timeout=30.0)
        assert set(carriers(comm)["data"].values()) == {"shm"}
        comm.all_reduce(np.ones(1000, np.float32))
        assert child.stdout.readline() == b"ready\n"
        killer = threading.Timer(0.2, child.send_signal, (signal.SIGKILL,))
        killer.start()
        started = time.monotonic()
        with pytest.raises(hostring.PeerLostError) as lost:
            comm.all_reduce(np.ones(1_000_000, np.float32))
        assert lost.value.rank == 1
        assert time.monotonic() - started < 10.0
        killer.join()
        comm.close()
    finally:
        child.kill()
        child.wait(DEADLINE)
        child.stdin.close()
        child.stdout.close()


def test_ranks_that_sleep_are_woken() -> None:
    """Ranks that share cores never spin: every message has to ring. In processes, where the order of memory counts."""
    for kind, got in in_processes(3, asleep):
        assert kind == "ok", got
        assert got == (0, [float(3 * k + 3) for k in range(300)])


def asleep(comm: hostring.Comm) -> Any:
    comm.session.engine.patience.spins = 0
    return comm.session.engine.patience.spins, [
        float(comm.all_reduce(np.full(1, k + comm.rank, np.float32))[0]) for k in range(300)
    ]
