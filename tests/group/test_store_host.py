"""Rank 0 hosts the store: on which addresses, and for how long."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest
from at_a_store import SECRET, hosted, soon
from ranks import free_port, side_by_side

from hostring.errors import RendezvousError
from hostring.group import rendezvous
from hostring.group.config import Config
from hostring.group.rendezvous import exchange
from hostring.group.store_host import open_store
from hostring.group.waiting import Waiting
from hostring.rendezvous import TcpStore
from hostring.transports.tcp import listen_at


def test_twenty_groups_one_after_the_other_on_one_port() -> None:
    """Rank 0 opens and closes the store each time; others are faster or slower, and may find the old one there."""
    port = free_port()

    def rank(r: int) -> list[list[bytes]]:
        collected = []
        for i in range(20):
            deadline = soon(30.0)
            store, close = open_store(hosted(r, port), deadline, Waiting(r, deadline))
            collected.append(exchange(store, "g", r, 3, b"%d.%d" % (r, i), deadline))
            if r == 0:
                rendezvous.linger(store, "g", 3)
            time.sleep(0.001 * ((7 * r + 3 * i) % 11))
            close()
        return collected

    threads = threading.active_count()
    for got in side_by_side([lambda r=r: rank(r) for r in range(3)]):
        assert got == [[b"%d.%d" % (r, i) for r in range(3)] for i in range(20)]
    assert threading.active_count() == threads


def test_two_groups_at_once_share_the_store_of_one_port() -> None:
    port = free_port()
    deadline = soon()
    first, close_first = open_store(hosted(0, port), deadline, Waiting(0, deadline))
    second, close_second = open_store(hosted(0, port), deadline, Waiting(0, deadline))
    first.set("a", b"b")
    close_first()
    assert second.get("a", 1.0) == b"b"
    close_second()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_a_port_in_use_is_reported_at_once() -> None:
    taken = listen_at("127.0.0.1", 0)
    deadline = soon()
    with pytest.raises(RendezvousError, match=r"port \d+ of 127.0.0.1 is in use; choose another MASTER_PORT"):
        open_store(hosted(0, taken.getsockname()[1]), deadline, Waiting(0, deadline))
    taken.close()


def test_localhost_is_served_on_both_loopback_addresses() -> None:
    """One host resolves ::1, the other 127.0.0.1: they must meet nevertheless."""
    port = free_port()
    deadline = soon()
    _, close = open_store(
        Config(world_size=2, store_host="localhost", store_port=port, secret=SECRET), deadline, Waiting(0, deadline)
    )
    for host in ("127.0.0.1", "::1"):
        store = TcpStore.at(host, port, secret=SECRET)
        store.set("seen", host.encode())
        assert store.get("seen", 1.0) == host.encode()
        store.close()
    close()


def test_a_name_that_means_loopback_here_is_served_on_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a host's own name the address 127.0.1.1, which no other host can reach."""
    monkeypatch.setattr(
        "hostring.group.store_host.resolve", lambda host: ["127.0.1.1"] if host == "thishost" else [host]
    )
    from hostring.group.store_host import _listening

    sockets = _listening("thishost", 0)
    assert [sock.getsockname()[0] for sock in sockets] in (["::"], ["0.0.0.0"])
    for sock in sockets:
        sock.close()
    sockets = _listening("127.0.0.1", 0)
    assert [sock.getsockname()[0] for sock in sockets] == ["127.0.0.1"]
    sockets[0].close()


def test_ranks_of_one_mpi_job_meet_through_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def rank(r: int) -> list[list[bytes]]:
        collected = []
        for i in range(5):
            deadline = soon(30.0)
            store, close = open_store(Config(rank=r, world_size=2, job="j"), deadline, Waiting(r, deadline))
            collected.append(exchange(store, "g", r, 2, b"%d.%d" % (r, i), deadline))
            if r == 0:
                rendezvous.linger(store, "g", 2)
            close()
        return collected

    for got in side_by_side([lambda: rank(0), lambda: rank(1)]):
        assert got == [[b"%d.%d" % (r, i) for r in range(2)] for i in range(5)]
    assert os.listdir(tmp_path / os.listdir(tmp_path)[0]) == []
