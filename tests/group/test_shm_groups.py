"""Groups whose ranks share memory: by default within a host, never with transport="tcp", and with the same bits."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import bits, fold_in_order, rank_distinct
from ranks import in_processes, in_threads, side_by_side, successes
from shm_links import footprint

import hostring
from hostring.group import start as starting
from hostring.group.group import connect
from hostring.rendezvous import MemoryStore
from hostring.transports import auto, memory_order, sharing, shm
from hostring.transports.addresses import interfaces, is_loopback

pytestmark = pytest.mark.skipif(bool(memory_order.unsupported()), reason=memory_order.unsupported())

SIZES = (0, 1, 7, 1000, 20_000, 100_003)
DEADLINE = 30.0


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


def test_tcp_stays_tcp_even_when_the_others_would_share() -> None:
    store = MemoryStore()

    def body(rank: int, transport: str) -> Any:
        with hostring.init(rank, 3, store=store, transport=transport, timeout=20.0) as comm:
            return carriers(comm)["data"], reduced(comm)

    got = successes(side_by_side([lambda: body(0, "auto"), lambda: body(1, "tcp"), lambda: body(2, "auto")]))
    assert [links for links, _ in got] == [{1: "tcp", 2: "shm"}, {0: "tcp", 2: "tcp"}, {0: "shm", 1: "tcp"}]
    assert all(results == expected(3) for _, results in got)
    for links in in_threads(2, carriers, transport="tcp"):
        assert {carrier for kind in links.values() for carrier in kind.values()} == {"tcp"}


def test_two_hosts_with_two_ranks_each_share_memory_within_each(monkeypatch: pytest.MonkeyPatch) -> None:
    outward = [i.host for i in interfaces() if not is_loopback(i.host) and ":" not in i.host]
    if not outward:
        pytest.skip("needs an address that is not loopback: ranks of different hosts are given no other")
    monkeypatch.setenv("HOSTRING_INTERFACE", f"{outward[0]}/32")
    monkeypatch.setenv("HOSTRING_SECRET", "shared")
    this_peer = starting.this_peer

    def of_a_host(addresses: list[Any]) -> Any:
        host = "ab"[int(threading.current_thread().name.split()[1]) // 2]
        return replace(this_peer(addresses), host_id=host, net_id=host)

    monkeypatch.setattr(starting, "this_peer", of_a_host)
    store = MemoryStore()

    def body(rank: int) -> Any:
        with hostring.init(rank, 4, store=store, timeout=20.0) as comm:
            return carriers(comm), reduced(comm)

    for rank, (links, results) in enumerate(successes(side_by_side([lambda r=r: body(r) for r in range(4)]))):
        neighbour = rank ^ 1
        for kind in ("data", "p2p"):
            assert links[kind] == {peer: "shm" if peer == neighbour else "tcp" for peer in range(4) if peer != rank}
        assert results == expected(4)


def broken(*_: Any) -> Any:
    raise OSError("no memory here")


def test_without_shared_memory_auto_goes_on_and_says_so_once_a_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hostring")
    monkeypatch.setattr(sharing, "create", broken)
    for links, results in in_threads(2, lambda comm: (carriers(comm), reduced(comm)), transport="auto"):
        assert {carrier for kind in links.values() for carrier in kind.values()} == {"unix"}
        assert results == expected(2)
    said = [record for record in caplog.records if "without shared memory" in record.getMessage()]
    assert len(said) == 4  # data and p2p, at both ends
    assert {record.levelname for record in said} == {"INFO"}


def test_without_shared_memory_shm_is_an_error_that_names_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "create", broken)
    for rank, outcome in enumerate(in_threads(2, carriers, transport="shm", check=False)):
        assert isinstance(outcome, hostring.RendezvousError), outcome
        assert f"rank {rank} can't share memory with rank {1 - rank}; use transport='auto'" in str(outcome)


def test_a_machine_of_unknown_memory_order_uses_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "sparc64")
    for links in in_threads(2, carriers, transport="auto"):
        assert {carrier for kind in links.values() for carrier in kind.values()} == {"tcp"}
    with pytest.raises(ValueError, match=r"sparc64 .* use transport='auto'"):
        hostring.init(0, 2, transport="shm", store=MemoryStore())


def test_a_taken_name_costs_the_memory_not_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "beside", lambda port: "@hostring-test-taken")
    squatter = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    squatter.bind("\0hostring-test-taken")
    for links in in_threads(2, carriers, transport="auto"):
        assert set(links["data"].values()) == {"tcp"}
    squatter.close()


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


def test_a_ring_config_within_one_host_shares_memory(tmp_path: Path) -> None:
    """Rank 1 dials; rank 0 listens before, so that there is no race for who is found first."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])

    def body(rank: int) -> Any:
        if rank == 1:
            end = time.monotonic() + DEADLINE
            while f"@hostring-{ports[0]}" not in Path("/proc/net/unix").read_text(encoding="utf-8"):
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(0.05)  # the TCP listener comes after it
        path = tmp_path / f"{rank}.json"
        ring = {
            "master_ip": None if rank == 0 else "127.0.0.1",
            "master_port": 9002,
            "port": ports[rank],
            "right_ip": "127.0.0.1",
        }
        path.write_text(
            json.dumps({**ring, "right_port": ports[1 - rank], "rank": rank, "world_size": 2}), encoding="utf-8"
        )
        config = bootstrap_config(str(path))
        group = connect(config, neighbours=lambda r, n: {1 - r}, contract={})
        kinds = {kind: type(getattr(group, kind)[1 - rank]).__name__ for kind in ("data", "control", "p2p")}
        group.close()
        return kinds

    for kinds in successes(side_by_side([lambda: body(0), lambda: body(1)])):
        assert kinds == {"data": "ShmLink", "control": "SocketLink", "p2p": "ShmLink"}


def bootstrap_config(path: str) -> Any:
    from hostring.group.config import from_environment

    return from_environment(timeout=20.0, environ={"RING_CONFIG": path, "HOSTRING_SECRET": "shared"})


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
