"""Which of the addresses that a rank offers another one dials."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import replace
from typing import Any

import pytest
from forming import CONTRACT, close_all, configs, form, talk
from ranks import free_port

from hostring.errors import HandshakeError, RendezvousError
from hostring.group import peers
from hostring.group.peer_info import Entry, PeerInfo, this_peer
from hostring.group.roster import Roster
from hostring.transports.addresses import interfaces, is_loopback

pytestmark = pytest.mark.usefixtures("own_folder")


def a_rank(host: str, net: str, *addresses: str) -> PeerInfo:
    return replace(this_peer([(a, 5) for a in addresses]), hostname=host, host_id=host, net_id=net)


def roster(*members: PeerInfo, transport: str = "tcp") -> Roster:
    entries = [Entry(r, len(members), bytes([r]) * 16, transport, CONTRACT, m) for r, m in enumerate(members)]
    return Roster("world", b"", entries[0], entries)


def test_loopback_addresses_are_no_use_to_another_host() -> None:
    roster(a_rank("a", "a", "10.0.0.1"), a_rank("b", "b", "10.0.0.2")).check()
    roster(a_rank("a", "a", "127.0.0.1"), a_rank("a", "a", "127.0.0.1")).check()
    for members, who in (
        ((a_rank("a", "a", "127.0.0.1", "::1"), a_rank("b", "b", "10.0.0.2")), 0),
        ((a_rank("a", "a", "10.0.0.1"), a_rank("b", "b", "127.0.1.1")), 1),
    ):
        with pytest.raises(
            RendezvousError, match=f"rank 0 is on a, rank 1 on b, but rank {who} offers only loopback.*MASTER_ADDR"
        ):
            roster(*members).check()
    both = roster(a_rank("a", "a", "10.0.0.1"), a_rank("b", "b", "127.0.0.1", "10.0.0.2"))
    assert both.addresses_of(1) == [("10.0.0.2", 5)]
    same = roster(a_rank("a", "a", "10.0.0.1"), a_rank("a", "a", "127.0.0.1", "10.0.0.2"))
    assert same.addresses_of(1) == [("127.0.0.1", 5), ("10.0.0.2", 5)]


def test_a_rank_that_published_itself_as_another_is_named() -> None:
    good = roster(a_rank("a", "a"), a_rank("a", "a"), a_rank("a", "a"))
    good.check()
    entries = [*good.entries[:2], replace(good.entries[2], rank=1)]
    with pytest.raises(HandshakeError, match="rank 1 published itself as rank 2") as failure:
        Roster("world", b"", entries[0], entries).check()
    assert failure.value.rank == 2


def test_an_entry_of_another_world_size_is_refused_as_it_is_read() -> None:
    mine, theirs = roster(a_rank("a", "a"), a_rank("a", "a")).entries
    data = theirs.to_bytes()
    assert Entry.from_bytes(1, data, mine) == theirs
    with pytest.raises(HandshakeError, match="world_size differs: rank 0 has 3, rank 1 has 2; give all ranks the same"):
        Entry.from_bytes(1, data, replace(mine, world_size=3))


def test_link_local_addresses_are_dialled_on_our_own_interface() -> None:
    pair = roster(a_rank("a", "a", "10.0.0.1", "fe80::1%eth7"), a_rank("b", "b", "fe80::2%enp3s0"))
    assert pair.addresses_of(1) == [("fe80::2%eth7", 5)]


@pytest.mark.parametrize(
    ("transport", "message"), [("unix", "needs all ranks on one host"), ("memory", "needs all ranks in one process")]
)
def test_transports_that_do_not_reach_another_host_say_so(transport: str, message: str) -> None:
    with pytest.raises(HandshakeError, match=message):
        roster(a_rank("a", "a"), a_rank("b", "b"), transport=transport).check()


def test_the_first_address_that_answers_wins_and_the_others_cost_little() -> None:
    """Rank 0 offers addresses that lead nowhere: a closed port, a black hole, somebody else's port."""
    two = configs(2)
    elsewhere = socket.create_server(("127.0.0.1", 0))
    bad = [("127.0.0.1", free_port()), ("192.0.2.123", 9), ("127.0.0.1", elsewhere.getsockname()[1])]
    real = peers.open_listeners

    def offer_more(start: Any, hosts: Any) -> Any:
        good = real(start, hosts)
        return [*bad, *good] if start.rank == 0 else good

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "open_listeners", offer_more)
        started = time.monotonic()
        groups = form(two)
        assert time.monotonic() - started < 4.0
    talk(groups)
    close_all(groups)
    elsewhere.close()


@pytest.mark.skipif(all(is_loopback(i.host) for i in interfaces()), reason="this host has no other address")
def test_the_interface_option_opens_the_bind_and_the_open_door_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outward = next(i for i in interfaces() if not is_loopback(i.host) and "%" not in i.host)
    groups = form(configs(2, interface=outward.name, secret=b""))
    assert outward.host in groups[0].hosts
    assert not any(map(is_loopback, groups[0].hosts))
    talk(groups)
    close_all(groups)
    warnings = [r.getMessage() for r in caplog.records if "without a secret" in r.getMessage()]
    assert len(warnings) == 1
    assert outward.host in warnings[0]
    assert any(f"rank 1 reaches rank 0 at {outward.host}:" in r.getMessage() for r in caplog.records)
