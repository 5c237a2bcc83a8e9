"""Groups whose RING_CONFIG files say where each rank listens: no store, links between neighbours only."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forming import CONTRACT, KINDS, close_all, form, left_behind, next_one, talk
from ranks import free_port, free_ports, side_by_side

from hostring.errors import HandshakeError, RendezvousError
from hostring.group.config import Config, from_environment
from hostring.group.group import Group, connect
from hostring.transports.addresses import interfaces, is_loopback

pytestmark = pytest.mark.usefixtures("own_folder")


def ring_config(ports: Sequence[int], rank: int, **changes: Any) -> Config:
    """Through a file as in seed 004."""
    n = len(ports)
    right = (rank + 1) % n
    content = {
        "master_ip": None if rank == 0 else "127.0.0.1",
        "master_port": 9002,
        "port": ports[rank],
        "right_ip": "127.0.0.1",
        "right_port": ports[right],
        "rank": rank,
        "world_size": n,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ring.json")
        Path(path).write_text(json.dumps(content), encoding="utf-8")
        config = from_environment(timeout=20.0, environ={"RING_CONFIG": path, "HOSTRING_SECRET": "shared"})
    return replace(config, **changes)


def test_a_contract_that_differs_only_in_the_hello_is_an_error_on_both_sides() -> None:
    """Without a store, the hello is the first that ranks hear of each other's contract."""
    ports = free_ports(2)
    outcomes = form(
        [ring_config(ports, r) for r in range(2)], contracts=[{"order": "rank", "n": 1}, {"order": "ring", "n": 1}]
    )
    for outcome in outcomes:
        assert isinstance(outcome, HandshakeError), outcome
        assert "order='rank'" in str(outcome)
        assert "order='ring'" in str(outcome)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ring_config_links_neighbours(world_size: int) -> None:
    ports = free_ports(world_size)
    close_all(
        form([ring_config(ports, r) for r in range(world_size)], neighbours=next_one)
    )  # what a process opens once stays
    before = left_behind()
    groups = form([ring_config(ports, r) for r in range(world_size)], neighbours=next_one)
    for r, group in enumerate(groups):
        assert isinstance(group, Group), group
        neighbours = {(r + 1) % world_size, (r - 1) % world_size}
        for kind in KINDS:
            assert set(getattr(group, kind)) == neighbours
        assert {p for p, member in enumerate(group.peer_infos) if member is not None} == {*neighbours, r}
        assert {member.pid for member in group.peer_infos if member is not None} == {os.getpid()}
        assert group.store is None
    talk(groups)
    close_all(groups)
    assert left_behind() == before


def test_ring_config_start_order_is_free_and_repeats_on_the_same_ports() -> None:
    ports = free_ports(3)

    def rank(r: int) -> None:
        for i in range(5):
            time.sleep(0.05 * ((r * 2 + i) % 3))
            group = connect(ring_config(ports, r), neighbours=next_one, contract=CONTRACT)
            word = b"%d" % i
            for link in group.data.values():
                link.send([word])
            for link in group.data.values():
                got = bytearray(1)
                end = time.monotonic() + 10
                while not link.recv_into(got):
                    assert time.monotonic() < end
                    time.sleep(0.001)
                assert got == word, "links of two starts are mixed"
            group.close()

    assert side_by_side([lambda r=r: rank(r) for r in range(3)]) == [None, None, None]


def test_ring_config_names_who_is_missing() -> None:
    ports = free_ports(3)
    outcomes = form([ring_config(ports, r, timeout=0.8) for r in (0, 1)], neighbours=next_one)
    assert [type(outcome) for outcome in outcomes] == [RendezvousError, RendezvousError]
    assert "rank 0 has no link with rank 2 at the deadline; nobody dialled from there" in str(outcomes[0])
    assert f"rank 1 has no link with rank 2 at the deadline (rank 2: 127.0.0.1:{ports[2]}: " in str(outcomes[1])


def test_ring_config_refuses_a_wrong_secret_within_seconds() -> None:
    ports = free_ports(2)
    started = time.monotonic()
    outcomes = form([ring_config(ports, 0, timeout=3.0), ring_config(ports, 1, secret=b"other")], neighbours=next_one)
    assert isinstance(outcomes[1], HandshakeError)
    assert "does not know the group's secret" in str(outcomes[1])
    assert isinstance(outcomes[0], RendezvousError)
    assert time.monotonic() - started < 8.0


def test_ring_config_port_in_use_and_names_that_do_not_resolve() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = [taken.getsockname()[1], free_port()]
        with socket.socket(socket.AF_INET6) as other:
            other.bind(("::1", ports[0]))
            with pytest.raises(RendezvousError, match=f"rank 0 can't listen: none of its addresses.*port {ports[0]}"):
                connect(ring_config(ports, 0), neighbours=next_one, contract=CONTRACT)
    config = ring_config(ports, 0)
    assert config.ring is not None
    lost = replace(config, ring=replace(config.ring, right_ip="no-such-host.invalid"))
    with pytest.raises(RendezvousError, match=r"right_ip 'no-such-host\.invalid' of RING_CONFIG can't be resolved"):
        connect(lost, neighbours=next_one, contract=CONTRACT)
    with pytest.raises(ValueError, match="transport='unix' has no use for"):
        connect(replace(config, transport="unix"), neighbours=next_one, contract=CONTRACT)


@pytest.mark.skipif(all(is_loopback(i.host) for i in interfaces()), reason="this host has no other address")
def test_ring_config_without_a_secret_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    outward = next(i.host for i in interfaces() if not is_loopback(i.host) and ":" not in i.host)
    ports = free_ports(3)
    rings = [ring_config(ports, r, secret=b"") for r in range(3)]
    groups = form([replace(c, ring=replace(c.ring, right_ip=outward)) for c in rings if c.ring], neighbours=next_one)
    talk(groups)
    close_all(groups)
    warnings = [r.getMessage() for r in caplog.records if "without a secret" in r.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith("hostring: rank 0 listens on ")
