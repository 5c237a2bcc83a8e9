from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from hostring.errors import HandshakeError, PeerLostError, RendezvousError
from hostring.group import dialing as wiring
from hostring.group import peers
from hostring.group.config import Config, from_environment
from hostring.group.group import Group, connect
from hostring.group.handshake import Hello, dial
from hostring.group.peer_info import Member, this_member
from hostring.group.rendezvous import MemoryStore
from hostring.group.roster import Entry, Roster
from hostring.store.protocol import framed
from hostring.transports.addresses import interfaces, is_loopback

CONTRACT = {"order": "rank"}
KINDS = ("data", "control", "p2p")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """So that socket files of other processes don't count as ours. Short, for a socket's path may not be long."""
    tmp_path_factory.getbasetemp()  # pytest's own must not be made in there
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def everyone(rank: int, world_size: int) -> set[int]:
    return set(range(world_size)) - {rank}


def next_one(rank: int, world_size: int) -> set[int]:
    return {(rank + 1) % world_size}


def in_threads(jobs: Sequence[Callable[[], Any]], timeout: float = 60.0) -> list[Any]:
    results: list[Any] = [TimeoutError("hangs")] * len(jobs)

    def body(i: int) -> None:
        try:
            results[i] = jobs[i]()
        except Exception as exc:
            results[i] = exc

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    return results


def form(
    configs: Sequence[Config], neighbours: Any = everyone, contracts: Sequence[dict[str, Any]] | None = None
) -> list[Any]:
    """Connect all ranks; groups, or what they raised."""
    contracts = contracts or [CONTRACT] * len(configs)
    pairs = zip(configs, contracts, strict=True)
    return in_threads([lambda c=c, k=k: connect(c, neighbours=neighbours, contract=k) for c, k in pairs])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configs(world_size: int, transport: str = "tcp", **changes: Any) -> list[Config]:
    base = Config(world_size=world_size, transport=transport, timeout=20.0, store=MemoryStore(), secret=b"shared")
    return [replace(base, rank=r, **changes) for r in range(world_size)]


def hosted(world_size: int, host: str = "127.0.0.1", **changes: Any) -> list[Config]:
    return configs(world_size, store=None, store_host=host, store_port=free_port(), **changes)


def talk(groups: Sequence[Group]) -> None:
    """Each link of each kind carries a word of its own, both ways."""
    for group in groups:
        for kind in KINDS:
            for peer, link in getattr(group, kind).items():
                assert link.peer == peer
                assert link.send([f"{kind} {group.rank}>{peer}.".encode()]) > 0
    for group in groups:
        for kind in KINDS:
            for peer, link in getattr(group, kind).items():
                expected = f"{kind} {peer}>{group.rank}.".encode()
                got = bytearray()
                end = time.monotonic() + 10
                while len(got) < len(expected) and time.monotonic() < end:
                    chunk = bytearray(len(expected) - len(got))
                    got += chunk[: link.recv_into(chunk)]
                assert bytes(got) == expected


def close_all(groups: Sequence[Any]) -> None:
    for group in groups:
        if isinstance(group, Group):
            group.close()


def left_behind() -> tuple[int, int, list[str]]:
    sockets = glob.glob(os.path.join(tempfile.gettempdir(), "hostring-*", "s"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), sockets


@pytest.mark.parametrize("transport", ["memory", "tcp", "unix", "auto"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_pair_is_linked(transport: str, world_size: int) -> None:
    groups = form(configs(world_size, transport))
    others = [set(range(world_size)) - {r} for r in range(world_size)]
    for r, group in enumerate(groups):
        assert isinstance(group, Group), group
        assert (group.rank, group.world_size, group.name) == (r, world_size, "world")
        for kind in KINDS:
            assert set(getattr(group, kind)) == others[r]
        assert len(group.links) == 3 * (world_size - 1)
        assert [m.pid for m in group.members] == [os.getpid()] * world_size
        assert group.members[r].cores == sorted(os.sched_getaffinity(0))
    assert len({group.epoch for group in groups}) == 1
    assert len({group.secret for group in groups}) == 1
    assert groups[0].secret not in repr(groups[0]).encode()
    talk(groups)
    close_all(groups)


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_data_links_lead_to_neighbours_only_and_are_symmetric(transport: str) -> None:
    groups = form(configs(5, transport), neighbours=next_one)
    for r, group in enumerate(groups):
        assert set(group.data) == {(r + 1) % 5, (r - 1) % 5}
        assert set(group.control) == set(group.p2p) == set(range(5)) - {r}
    talk(groups)
    close_all(groups)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_rank_0_hosts_the_store(world_size: int, host: str) -> None:
    groups = form(hosted(world_size, host))
    talk(groups)
    groups[1].store.set("still", b"there")
    assert groups[0].store.get("still", 1.0) == b"there"
    assert all(is_loopback(address) for group in groups for address in group.hosts)
    close_all(groups)


def test_a_world_of_one_needs_nobody() -> None:
    group = connect(Config(), neighbours=everyone, contract=CONTRACT)
    assert (group.rank, group.world_size, group.links, group.store) == (0, 1, [], None)
    assert group.members[0].pid == os.getpid()
    group.close()


@pytest.mark.parametrize("transport", ["memory", "tcp", "unix"])
def test_init_and_close_twenty_times_on_one_port(transport: str) -> None:
    """Ranks drift apart: each closes and starts again while others still hold the old group or the old store."""
    port = free_port()

    def rank(r: int) -> list[int]:
        epochs = []
        for i in range(20):
            config = Config(
                rank=r, world_size=3, transport=transport, timeout=30.0, store_host="127.0.0.1", store_port=port
            )
            group = connect(config, neighbours=everyone, contract=CONTRACT)
            epochs.append(group.epoch)
            assert set(group.data) == {0, 1, 2} - {r}
            time.sleep(0.001 * ((5 * r + 3 * i) % 7))
            group.close()
        return epochs

    before = left_behind()
    epochs = in_threads([lambda r=r: rank(r) for r in range(3)])
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(set(epochs[0])) == 20
    assert left_behind() == before


def test_a_late_rank_is_waited_for_and_named_once_per_host(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostring.group.rendezvous.FIRST_NEWS", 0.4)
    monkeypatch.setattr("hostring.group.rendezvous.MORE_NEWS", 0.5)
    four = configs(4)

    def late() -> Group:
        time.sleep(2.5)
        return connect(four[3], neighbours=everyone, contract=CONTRACT)

    jobs = [lambda c=c: connect(c, neighbours=everyone, contract=CONTRACT) for c in four[:3]]
    groups = in_threads([*jobs, late])
    talk(groups)
    close_all(groups)
    lines = [r.getMessage() for r in caplog.records if "waits for rank 3 (" in r.getMessage()]
    assert "hostring: rank 0 waits for rank 3 (3 of 4 here, " in lines[-1]
    assert "s of 20 s)" in lines[-1]
    assert not [line for line in lines if "rank 0" not in line][2:], "the lowest rank of a host speaks for the others"


def test_a_rank_that_never_comes_is_named_at_the_deadline() -> None:
    started = time.monotonic()
    before = left_behind()
    outcomes = form([replace(c, timeout=0.8) for c in hosted(3)[:2]])
    assert time.monotonic() - started < 6.0
    for outcome in outcomes:
        assert isinstance(outcome, RendezvousError)
        assert "waited in vain for rank 2" in str(outcome)
    assert left_behind() == before


def test_a_store_that_never_comes_is_reported_at_the_deadline() -> None:
    started = time.monotonic()
    outcome = form([replace(hosted(2)[1], timeout=0.5)])[0]
    assert isinstance(outcome, RendezvousError)
    assert "could not reach the store in time; is rank 0 up, and MASTER_ADDR an address of its host?" in str(outcome)
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("make", [configs, hosted], ids=["given store", "hosted store"])
@pytest.mark.parametrize("odd", [0, 2])
def test_contracts_that_differ_are_reported_on_every_rank(make: Callable[[int], list[Config]], odd: int) -> None:
    before = left_behind()
    contracts = [{"order": "tree" if r == odd else "rank"} for r in range(3)]
    outcomes = form(make(3), contracts=contracts)
    for r, outcome in enumerate(outcomes):
        assert isinstance(outcome, HandshakeError), outcome
        assert f"rank {r} has order={contracts[r]['order']!r}" in str(outcome)
        assert "order='tree'" in str(outcome)
        assert "order='rank'" in str(outcome)
    assert left_behind() == before


def test_world_sizes_that_differ_are_reported_on_every_rank() -> None:
    two = hosted(2)
    started = time.monotonic()
    outcomes = form([two[0], replace(two[1], world_size=3)])
    assert time.monotonic() - started < 10.0
    for outcome in outcomes:
        assert isinstance(outcome, HandshakeError)
        assert "world_size differs" in str(outcome)


def test_transports_that_differ_are_reported() -> None:
    two = configs(2)
    outcomes = form([two[0], replace(two[1], transport="unix")])
    for outcome in outcomes:
        assert isinstance(outcome, HandshakeError)
        assert "transport differs" in str(outcome)


def test_configurations_that_make_no_sense_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(ValueError, match="transport='carrier pigeon' is none of"):
        connect(Config(transport="carrier pigeon"), neighbours=everyone, contract=CONTRACT)
    with pytest.raises(ValueError, match="rank 3 is not in 0…2"):
        connect(Config(rank=3, world_size=3), neighbours=everyone, contract=CONTRACT)
    with pytest.raises(ValueError, match="nothing says where the ranks meet"):
        connect(Config(rank=0, world_size=3), neighbours=everyone, contract=CONTRACT)


# ---------------------------------------------------------------------------------------------- strangers


class OpenStart:
    """Three ranks start; rank 2 has published itself but makes no links before `finish`, so that ranks 0 and 1 keep listening."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.release = threading.Event()
        self.sent_to_0: list[bytes] = []
        real_run, real_send = wiring.Wiring.run, wiring.send

        def held(work: wiring.Wiring) -> Any:
            if work.hello.rank == 2:
                self.release.wait(30)
            return real_run(work)

        async def tapped(sock: socket.socket, data: bytes) -> None:
            if sock.getpeername() == self.address:
                self.sent_to_0.append(data)
            await real_send(sock, data)

        monkeypatch.setattr(wiring.Wiring, "run", held)
        monkeypatch.setattr(wiring, "send", tapped)
        self.address = ("", 0)
        three = configs(3, **changes)
        self.groups: list[Any] = []
        jobs = [lambda c=c: connect(c, neighbours=everyone, contract=CONTRACT) for c in three]
        self.thread = threading.Thread(target=lambda: self.groups.extend(in_threads(jobs)), daemon=True)
        store = three[0].store
        published = store.set

        def see(key: str, value: bytes) -> None:
            if key == "world/0/1/0":
                self.address = next(a for a in Entry.from_bytes(0, value).member.addresses if a[0] == "127.0.0.1")
            published(key, value)

        monkeypatch.setattr(store, "set", see)
        self.thread.start()
        self.entries = [Entry.from_bytes(r, store.get(f"world/0/1/{r}", 10.0)) for r in range(3)]

    def roster(self, rank: int, secret: bytes = b"shared") -> Roster:
        return Roster("world", secret, self.entries[rank], self.entries)

    def stranger(self, data: bytes) -> socket.socket:
        sock = socket.create_connection(self.address, timeout=10)
        sock.sendall(data)
        return sock

    def finish(self) -> float:
        """Let rank 2 go on. Returns how long the start then took; all ranks must have all links, and nothing else."""
        started = time.monotonic()
        self.release.set()
        self.thread.join(60)
        took = time.monotonic() - started
        assert [len(group.links) for group in self.groups] == [6, 6, 6]
        talk(self.groups)
        close_all(self.groups)
        return took


@pytest.fixture
def open_start(monkeypatch: pytest.MonkeyPatch) -> OpenStart:
    return OpenStart(monkeypatch)


def read_frame(sock: socket.socket) -> bytes:
    def exactly(n: int) -> bytes:
        data = b""
        while len(data) < n:
            more = sock.recv(n - len(data))
            if not more:
                raise EOFError("closed")
            data += more
        return data

    return exactly(int.from_bytes(exactly(4), "little"))


def dial_by_hand(address: tuple[str, int], hello: Hello, peer: int, secret: bytes) -> None:
    """Say hello as a rank of our own making, and raise what the other side makes of it."""
    with socket.create_connection(address, timeout=5) as sock:
        protocol = dial(hello, peer, secret)
        out = next(protocol)
        with contextlib.suppress(StopIteration):
            while True:
                sock.sendall(framed(out))
                out = protocol.send(read_frame(sock))


JUNK = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x05\0\0\0junk!",
    b"\xff\xff\xff\xffxxxx",
    framed(b"\xc1"),
    framed(msgpack.packb({"hostring": 1})),
    framed(msgpack.packb({"hostring": 2})),
    framed(msgpack.packb([1] * 100)),
]


def test_fifty_strangers_neither_get_in_nor_hold_up_the_start(
    open_start: OpenStart, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    strangers = [open_start.stranger(JUNK[i % len(JUNK)]) for i in range(50)]
    assert open_start.finish() < 3.0
    dropped = [r for r in caplog.records if "dropped a caller" in r.getMessage()]
    assert len(dropped) > 5
    assert sum(r.levelno >= logging.WARNING for r in dropped) == 5, "a scanner must not flood the terminal"
    for sock in strangers:
        sock.close()


def test_more_silent_strangers_than_fit_make_room(open_start: OpenStart) -> None:
    strangers = [open_start.stranger(b"\x10") for _ in range(wiring.STRANGERS_LIMIT + 50)]
    assert open_start.finish() < 4.0
    for sock in strangers:
        sock.close()


def test_a_silent_stranger_is_dropped_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wiring, "HELLO_SECONDS", 0.5)
    start = OpenStart(monkeypatch)
    started = time.monotonic()
    with start.stranger(b"\x10") as sock:
        assert sock.recv(100) == b""
    assert time.monotonic() - started < 4.0
    start.finish()
    assert "silent for 0 s" in caplog.text or "silent for 1 s" in caplog.text


@pytest.mark.parametrize(
    ("reason", "change", "given_secret"),
    [
        ("secret", {}, b"wrong"),
        ("secret", {}, b""),
        ("group", {"group": b"another group..."}, b"shared"),
        ("world_size", {"world_size": 9}, b"shared"),
        ("rank", {"rank": 0}, b"shared"),
        ("duplicate", {"rank": 1, "session": b"another start..."}, b"shared"),
    ],
)
def test_who_does_not_belong_is_refused_and_the_start_goes_on(
    open_start: OpenStart, caplog: pytest.LogCaptureFixture, reason: str, change: dict[str, Any], given_secret: bytes
) -> None:
    """The impostor has read all of the store; in two cases it only lacks the secret."""
    caplog.set_level(logging.INFO)
    end = time.monotonic() + 10
    while reason == "duplicate" and len(open_start.sent_to_0) < 6 and time.monotonic() < end:
        time.sleep(0.01)  # rank 1 must have got there first
    honest = open_start.roster(2)
    hello = replace(honest.hello(), **{"kind": "control", **change})
    with pytest.raises(HandshakeError) as refused:
        dial_by_hand(open_start.address, hello, 0, open_start.roster(2, given_secret).secret)
    assert getattr(refused.value, "reason", None) == reason
    assert open_start.finish() < 4.0
    assert "dropped a caller at" in caplog.text
    assert "shared" not in caplog.text


def test_a_recorded_conversation_does_not_get_in_again(open_start: OpenStart) -> None:
    end = time.monotonic() + 10
    while len(open_start.sent_to_0) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    with open_start.stranger(framed(open_start.sent_to_0[0])) as sock:
        assert set(msgpack.unpackb(read_frame(sock))) == {"refused", "why"}
        with pytest.raises(EOFError):
            read_frame(sock)
    open_start.finish()


def test_a_contract_that_differs_only_in_the_hello_is_an_error_on_both_sides() -> None:
    """Without a store, the hello is the first that ranks hear of each other's contract."""
    ports = [free_port() for _ in range(2)]
    outcomes = form(
        [ring_config(ports, r) for r in range(2)], contracts=[{"order": "rank", "n": 1}, {"order": "ring", "n": 1}]
    )
    for outcome in outcomes:
        assert isinstance(outcome, HandshakeError), outcome
        assert "order='rank'" in str(outcome)
        assert "order='ring'" in str(outcome)


# ---------------------------------------------------------------------------------------------- RING_CONFIG


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
        Path(path).write_text(json.dumps(content))
        config = from_environment(timeout=20.0, environ={"RING_CONFIG": path, "HOSTRING_SECRET": "shared"})
    return replace(config, **changes)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ring_config_links_neighbours(world_size: int) -> None:
    ports = [free_port() for _ in range(world_size)]
    before = left_behind()
    groups = form([ring_config(ports, r) for r in range(world_size)], neighbours=next_one)
    for r, group in enumerate(groups):
        assert isinstance(group, Group), group
        neighbours = {(r + 1) % world_size, (r - 1) % world_size}
        for kind in KINDS:
            assert set(getattr(group, kind)) == neighbours
        assert {p for p, member in enumerate(group.members) if member is not None} == {*neighbours, r}
        assert {member.pid for member in group.members if member is not None} == {os.getpid()}
        assert group.store is None
    talk(groups)
    close_all(groups)
    assert left_behind() == before


def test_ring_config_start_order_is_free_and_repeats_on_the_same_ports() -> None:
    ports = [free_port() for _ in range(3)]

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

    assert in_threads([lambda r=r: rank(r) for r in range(3)]) == [None, None, None]


def test_ring_config_names_who_is_missing() -> None:
    ports = [free_port() for _ in range(3)]
    outcomes = form([ring_config(ports, r, timeout=0.8) for r in (0, 1)], neighbours=next_one)
    assert [type(outcome) for outcome in outcomes] == [RendezvousError, RendezvousError]
    assert "rank 0 has no link with rank 2 at the deadline; nobody dialled from there" in str(outcomes[0])
    assert f"rank 1 has no link with rank 2 at the deadline (rank 2: 127.0.0.1:{ports[2]}: " in str(outcomes[1])


def test_ring_config_refuses_a_wrong_secret_within_seconds() -> None:
    ports = [free_port() for _ in range(2)]
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
            with pytest.raises(RendezvousError, match=f"rank 0 can listen on none of its addresses.*port {ports[0]}"):
                connect(ring_config(ports, 0), neighbours=next_one, contract=CONTRACT)
    config = ring_config(ports, 0)
    assert config.ring is not None
    lost = replace(config, ring=replace(config.ring, right_ip="no-such-host.invalid"))
    with pytest.raises(RendezvousError, match=r"right_ip 'no-such-host\.invalid' of RING_CONFIG can't be resolved"):
        connect(lost, neighbours=next_one, contract=CONTRACT)
    with pytest.raises(ValueError, match="transport='unix' has no use for"):
        connect(replace(config, transport="unix"), neighbours=next_one, contract=CONTRACT)


# ---------------------------------------------------------------------------------------------- addresses


def member(host: str, net: str, *addresses: str) -> Member:
    return replace(this_member([(a, 5) for a in addresses]), hostname=host, host_id=host, net_id=net)


def roster(*members: Member, transport: str = "tcp") -> Roster:
    entries = [Entry(r, len(members), bytes([r]) * 16, transport, CONTRACT, m) for r, m in enumerate(members)]
    return Roster("world", b"", entries[0], entries)


def test_loopback_addresses_are_no_use_to_another_host() -> None:
    roster(member("a", "a", "10.0.0.1"), member("b", "b", "10.0.0.2")).check()
    roster(member("a", "a", "127.0.0.1"), member("a", "a", "127.0.0.1")).check()
    for members, who in (
        ((member("a", "a", "127.0.0.1", "::1"), member("b", "b", "10.0.0.2")), 0),
        ((member("a", "a", "10.0.0.1"), member("b", "b", "127.0.1.1")), 1),
    ):
        with pytest.raises(
            RendezvousError, match=f"rank 0 is on a, rank 1 on b, but rank {who} offers only loopback.*MASTER_ADDR"
        ):
            roster(*members).check()
    both = roster(member("a", "a", "10.0.0.1"), member("b", "b", "127.0.0.1", "10.0.0.2"))
    assert both.addresses_of(1) == [("10.0.0.2", 5)]
    same = roster(member("a", "a", "10.0.0.1"), member("a", "a", "127.0.0.1", "10.0.0.2"))
    assert same.addresses_of(1) == [("127.0.0.1", 5), ("10.0.0.2", 5)]


def test_link_local_addresses_are_dialled_on_our_own_interface() -> None:
    pair = roster(member("a", "a", "10.0.0.1", "fe80::1%eth7"), member("b", "b", "fe80::2%enp3s0"))
    assert pair.addresses_of(1) == [("fe80::2%eth7", 5)]


@pytest.mark.parametrize(
    ("transport", "message"), [("unix", "needs all ranks on one host"), ("memory", "needs all ranks in one process")]
)
def test_transports_that_do_not_reach_another_host_say_so(transport: str, message: str) -> None:
    with pytest.raises(HandshakeError, match=message):
        roster(member("a", "a"), member("b", "b"), transport=transport).check()


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


# ---------------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("transport", ["memory", "tcp", "unix"])
def test_subgroups_have_links_of_their_own(transport: str) -> None:
    groups = form(configs(5, transport))
    colours = {0: [0, 3], 1: [4, 1, 2]}
    board = MemoryStore()

    def split(r: int) -> Group:
        [(colour, members)] = [(c, ms) for c, ms in colours.items() if r in ms]

        def gather(payload: bytes) -> list[bytes]:
            board.set(f"{colour}/{r}", payload)
            return [board.get(f"{colour}/{m}", 10.0) for m in members]

        return groups[r].subgroup(
            str(colour), members.index(r), len(members), neighbours=everyone, contract=CONTRACT, exchange=gather
        )

    parts = in_threads([lambda r=r: split(r) for r in range(5)])
    for r, part in enumerate(parts):
        assert isinstance(part, Group), part
        assert part.world_size == len(colours[0 if r in colours[0] else 1])
        assert part.name == f"world/{0 if r in colours[0] else 1}"
        assert part.store is None
    assert (parts[4].rank, parts[1].rank, parts[2].rank) == (0, 1, 2)
    assert parts[0].epoch == parts[3].epoch != parts[1].epoch
    talk(parts)
    talk(groups)
    close_all(parts)
    talk(groups)
    close_all(groups)


def test_a_subgroup_of_one_still_takes_part_in_the_gathering() -> None:
    groups = form(configs(2, "memory"))
    gathered: list[bytes] = []

    def gather(payload: bytes) -> list[bytes]:
        gathered.append(payload)
        return [payload]

    alone = groups[0].subgroup("solo", 0, 1, neighbours=everyone, contract=CONTRACT, exchange=gather)
    assert (alone.world_size, alone.links, len(gathered)) == (1, [], 1)
    close_all([alone, *groups])


def test_closing_one_end_is_seen_at_the_other_and_closing_twice_is_fine() -> None:
    groups = form(configs(2))
    groups[0].control[1].send([b"bye"])
    groups[0].close()
    groups[0].close()
    got = bytearray(3)
    end = time.monotonic() + 10
    while not groups[1].control[0].recv_into(got) and time.monotonic() < end:
        time.sleep(0.001)
    assert got == b"bye"

    def read() -> None:
        while time.monotonic() < end:
            groups[1].control[0].recv_into(got)

    with pytest.raises(PeerLostError, match="rank 0 is lost"):
        read()
    groups[1].close()


def test_abort_reaches_every_link() -> None:
    groups = form(configs(3))
    groups[1].abort()
    for group in (groups[0], groups[2]):
        for kind in KINDS:
            link = getattr(group, kind)[1]
            end = time.monotonic() + 10

            def read(link: Any = link, end: float = end) -> None:
                while time.monotonic() < end:
                    link.recv_into(bytearray(1))

            with pytest.raises(PeerLostError, match="rank 1 is lost"):
                read()
    close_all(groups)


@pytest.mark.parametrize("transport", ["memory", "tcp", "unix"])
def test_nothing_is_left_after_close(transport: str) -> None:
    close_all(form(hosted(3, transport=transport)))
    before = left_behind()
    for _ in range(3):
        close_all(form(hosted(3, transport=transport)))
    assert left_behind() == before


def test_connecting_works_inside_a_running_event_loop() -> None:
    async def main() -> list[Any]:
        return form(configs(2))

    groups = asyncio.run(main())
    talk(groups)
    close_all(groups)

    async def directly() -> Group:
        two = hosted(2)
        other: list[Group] = []
        thread = threading.Thread(target=lambda: other.append(connect(two[1], neighbours=everyone, contract=CONTRACT)))
        thread.start()
        mine = connect(two[0], neighbours=everyone, contract=CONTRACT)  # blocks this loop, as a cell in a notebook does
        thread.join(10)
        close_all(other)
        return mine

    group = asyncio.run(directly())
    assert set(group.data) == {1}
    group.close()


def test_a_contract_too_large_for_a_hello_is_refused_at_once() -> None:
    started = time.monotonic()
    outcomes = form(configs(2), contracts=[{"order": "x" * 5000}] * 2)
    assert [type(outcome) for outcome in outcomes] == [ValueError, ValueError]
    assert "over the limit of 4096" in str(outcomes[0])
    assert time.monotonic() - started < 5.0


ALONE = """
import logging, sys
from hostring.bootstrap import connect
from hostring.config import Config, from_environment
logging.getLogger("hostring").setLevel(logging.ERROR)
print("up", flush=True)
connect(from_environment(), neighbours=lambda rank, n: set(), contract={})
"""


@pytest.mark.parametrize("where", ["rank 0 in the store", "rank 1 without a store", "ring"])
def test_ctrl_c_ends_every_wait_of_the_start(where: str, tmp_path: Path) -> None:
    env = {
        "RANK": "1" if "1" in where else "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    if where == "ring":
        path = tmp_path / "ring.json"
        keys = {
            "master_ip": None,
            "master_port": 9002,
            "port": free_port(),
            "right_ip": "127.0.0.1",
            "right_port": free_port(),
        }
        path.write_text(json.dumps({**keys, "rank": 1, "world_size": 3}))
        env = {"RING_CONFIG": str(path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = subprocess.Popen([sys.executable, "-c", ALONE], env={**os.environ, **env}, text=True, **pipes)
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n"
    time.sleep(1.0)
    running.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = running.communicate(timeout=30)
    assert time.monotonic() - started < 6.0
    assert any(line.startswith("KeyboardInterrupt") for line in err.splitlines()), err


def test_torch_store_brings_ranks_together() -> None:
    distributed = pytest.importorskip("torch.distributed")
    groups = form(configs(3, store=distributed.HashStore()))
    talk(groups)
    close_all(groups)
