"""Which links share memory: those within a host, where it is wanted and possible; and what is said where it is not."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from carried_groups import carriers, expected, reduced
from ranks import in_threads, side_by_side, successes

import hostring
from hostring.group import start as starting
from hostring.group.group import connect
from hostring.rendezvous import MemoryStore
from hostring.transports import auto, memory_order, sharing
from hostring.transports.addresses import interfaces, is_loopback

pytestmark = pytest.mark.skipif(bool(memory_order.unsupported()), reason=memory_order.unsupported())
DEADLINE = 30.0


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
