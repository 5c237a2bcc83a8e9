from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from hostring.errors import HandshakeError, RendezvousError
from hostring.group import rendezvous
from hostring.group.config import Config
from hostring.group.rendezvous import MemoryStore, Progress, StoreRefusedError, TcpStore, TorchStore, exchange
from hostring.group.store_host import open_store
from hostring.store import server as store_server
from hostring.store.protocol import framed, prove
from hostring.store.server import StoreServer
from hostring.store.stores import Store
from hostring.transports.addresses import listen

SECRET = b"known to the group"


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads; results, or the exceptions that they raised."""
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
        thread.join(60)
    return results


@pytest.fixture
def server() -> Iterator[StoreServer]:
    running = StoreServer([listen("127.0.0.1", 0)], SECRET)
    yield running
    running.close()


def client(server: StoreServer, secret: bytes = SECRET, **kwargs: Any) -> TcpStore:
    return TcpStore.at("127.0.0.1", server.port, secret=secret, **kwargs)


@pytest.fixture(params=["memory", "tcp", "torch"])
def shared(request: pytest.FixtureRequest) -> Iterator[Callable[[], Store]]:
    """Gives views of one store, one for each rank."""
    with contextlib.ExitStack() as stack:
        if request.param == "memory":
            store = MemoryStore()
            yield lambda: store
        elif request.param == "tcp":
            running = StoreServer([listen("127.0.0.1", 0)], SECRET)
            stack.callback(running.close)

            def connect() -> Store:
                made = client(running)
                stack.callback(made.close)
                return made

            yield connect
        else:
            distributed = pytest.importorskip("torch.distributed")
            torch_store = distributed.HashStore()
            yield lambda: TorchStore(torch_store)


def test_a_store_keeps_what_it_was_given(shared: Callable[[], Store]) -> None:
    mine, theirs = shared(), shared()
    assert isinstance(mine, Store)
    assert not mine.check(["a"])
    mine.set("a", b"\0\xff bytes")
    theirs.set("b", b"")
    assert theirs.get("a", 5.0) == b"\0\xff bytes"
    assert mine.get("b", 5.0) == b""
    assert mine.check(["a", "b"])
    assert not mine.check(["a", "c"])
    mine.set("a", b"new")
    assert theirs.get("a", 0.0) == b"new"
    mine.delete("a")
    mine.delete("never there")
    assert not theirs.check(["a"])
    mine.close()


def test_torch_stores_tell_the_way_to_them() -> None:
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wrapped = TorchStore(distributed.PrefixStore("a", distributed.PrefixStore("b", server)))
    assert wrapped.local_host == "127.0.0.1"
    assert TorchStore(distributed.HashStore()).local_host is None
    agent = TorchStore.agent("127.0.0.1", server.port, 2, 5.0)
    wrapped.set("key", b"\0value")
    with pytest.raises(TimeoutError):
        agent.get("key", 0.1)  # the prefix is part of the name
    agent.set("key", b"\xff")
    assert TorchStore(server).get("key", 1.0) == b"\xff"


def test_torchs_own_store_that_is_not_there_is_reported() -> None:
    pytest.importorskip("torch.distributed")
    with pytest.raises(RendezvousError, match=r"torchrun's store at 127\.0\.0\.1 port \d+ does not answer"):
        TorchStore.agent("127.0.0.1", free_port(), 2, 0.5)


def test_a_store_counts(shared: Callable[[], Store]) -> None:
    stores = [shared() for _ in range(4)]
    got = together(*[lambda store=store: [store.add("n", 1) for _ in range(25)] for store in stores])
    assert sorted(n for numbers in got for n in numbers) == list(range(1, 101))
    assert stores[0].add("n", -100) == 0
    assert stores[0].add("other", 5) == 5


def test_a_get_waits_for_a_set(shared: Callable[[], Store]) -> None:
    mine, theirs = shared(), shared()
    threading.Timer(0.2, theirs.set, ("late", b"here")).start()
    started = time.monotonic()
    assert mine.get("late", 10.0) == b"here"
    assert 0.1 < time.monotonic() - started < 5.0


def test_a_get_ends_at_its_timeout(shared: Callable[[], Store]) -> None:
    store = shared()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="'absent' is not in"):
        store.get("absent", 0.3)
    assert 0.2 < time.monotonic() - started < 3.0
    with pytest.raises(TimeoutError):
        store.get("absent", 0.0)


def test_one_client_serves_several_threads(server: StoreServer) -> None:
    """A waiting get holds up nobody."""
    store = client(server)
    waiting = threading.Thread(target=lambda: store.get("late", 20.0))
    waiting.start()
    time.sleep(0.05)
    started = time.monotonic()
    store.set("other", b"x")
    assert time.monotonic() - started < 2.0
    assert waiting.is_alive()
    store.set("late", b"y")
    waiting.join(10)
    assert not waiting.is_alive()
    store.close()
    store.close()
    with pytest.raises(ConnectionError, match="closed by this rank"):
        store.get("late", 1.0)


@pytest.mark.parametrize("secret", [b"wrong", b""])
def test_a_wrong_secret_is_refused_at_once_on_both_sides(
    server: StoreServer, secret: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    with pytest.raises(StoreRefusedError, match="secrets differ"):
        client(server, secret, deadline=soon()).set("a", b"b")
    assert time.monotonic() - started < 5.0
    assert "does not know the secret" in caplog.text
    assert SECRET.decode() not in caplog.text


def test_a_server_that_does_not_know_the_secret_is_refused() -> None:
    listener = listen("127.0.0.1", 0)
    listener.setblocking(True)

    def impostor() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(framed(msgpack.packb({"hostring": "store 1", "server": b"s" * 16, "nonce": b"n" * 16})))
            sock.recv(1000)
            sock.sendall(framed(msgpack.packb([True, b"p" * 32])))
            sock.recv(1000)

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(StoreRefusedError, match="does not know the group's secret"):
        TcpStore.at("127.0.0.1", listener.getsockname()[1], secret=SECRET, deadline=soon()).set("a", b"b")
    thread.join(10)
    listener.close()


def test_a_request_is_carried_out_once_even_when_its_answer_is_lost(server: StoreServer) -> None:
    store = client(server, deadline=soon())
    assert store.add("n", 1) == 1
    connection = store._idle[0]
    real_read = connection._read

    def cut(nbytes: int) -> bytes:
        real_read(nbytes)
        connection.sock.close()
        raise ConnectionResetError("cut in the middle of the answer")

    connection._read = cut  # type: ignore[method-assign]
    assert store.add("n", 1) == 2
    assert store.add("n", 0) == 2
    store.close()


def test_a_store_that_was_started_anew_says_so() -> None:
    first = StoreServer([listen("127.0.0.1", 0)], SECRET)
    port = first.port
    store = client(first, deadline=soon())
    store.set("a", b"b")
    first.close()
    second = StoreServer([listen("127.0.0.1", port)], SECRET)
    with pytest.raises(ConnectionError, match="started anew"):
        store.get("a", 5.0)
    assert not store.check(["a"])
    second.close()
    store.deadline = 0.0
    started = time.monotonic()
    with pytest.raises(ConnectionError, match=r"is gone|no store answers"):
        store.check(["a"])
    assert time.monotonic() - started < 3.0
    store.close()


def test_a_client_waits_for_its_server_until_the_deadline() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = TcpStore.at("127.0.0.1", port, secret=SECRET, deadline=soon(0.5))
    started = time.monotonic()
    with pytest.raises(ConnectionError, match=f"no store answers: 127.0.0.1:{port}: .*refused"):
        store.set("a", b"b")
    assert 0.3 < time.monotonic() - started < 3.0
    late: list[StoreServer] = []
    threading.Timer(0.4, lambda: late.append(StoreServer([listen("127.0.0.1", port)], SECRET))).start()
    store.deadline = soon()
    store.set("a", b"b")
    assert store.get("a", 1.0) == b"b"
    store.close()
    late[0].close()


JUNK = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x05\0\0\0junk!",
    b"\xff\xff\xff\xff" + b"x" * 100,
    framed(msgpack.packb([b"c" * 16, b"n" * 16, "not a proof"])),
    framed(msgpack.packb({"a": 1})),
    framed(msgpack.packb([1, 2, 3])),
    framed(b"\xc1"),
    framed(b"\x91" * 200),
    framed(msgpack.packb([b"c" * 16, b"n" * 16, prove(b"wrong", "store client", b"", b"c" * 16, b"n" * 16)])),
]


def test_strangers_get_nowhere_and_hold_up_nobody(server: StoreServer) -> None:
    strangers = []
    for junk in JUNK * 5:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        sock.sendall(junk)
        strangers.append(sock)
    store = client(server)
    started = time.monotonic()
    store.set("a", b"b")
    assert store.get("a", 1.0) == b"b"
    assert time.monotonic() - started < 2.0
    for sock in strangers:
        sock.close()
    store.close()


def test_silent_strangers_make_room_for_each_other(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [
        socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(store_server.STRANGERS_LIMIT * 2)
    ]
    store = client(server)
    started = time.monotonic()
    store.set("a", b"b")
    assert time.monotonic() - started < 2.0
    assert len(server._strangers) <= store_server.STRANGERS_LIMIT
    for sock in silent:
        sock.close()
    store.close()


def test_a_silent_stranger_is_dropped(monkeypatch: pytest.MonkeyPatch, server: StoreServer) -> None:
    monkeypatch.setattr(store_server, "HELLO_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        while sock.recv(1000):
            pass
    assert not server._strangers


def test_a_replayed_store_hello_is_refused(server: StoreServer) -> None:
    recorded: list[bytes] = []
    store = client(server)

    class Tap(socket.socket):
        def sendall(self, data: Any, *flags: Any) -> None:
            recorded.append(bytes(data))
            super().sendall(data, *flags)

    real = socket.create_connection

    def tapped(*args: Any, **kwargs: Any) -> socket.socket:
        sock = real(*args, **kwargs)
        return Tap(fileno=sock.detach())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", tapped)
        store.set("a", b"b")
    store.close()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(recorded[0])
        answer = b""
        while more := sock.recv(1000):
            answer += more
    greeting = struct.unpack_from("<I", answer)[0] + 4
    assert msgpack.unpackb(answer[greeting + 4 :]) == [False, "the secrets differ (HOSTRING_SECRET)"]


def test_what_is_too_much_is_refused_and_the_rest_goes_on(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "KEYS_LIMIT", 3)
    monkeypatch.setattr(store_server, "MEMORY_LIMIT", 100)
    store = client(server)
    with pytest.raises(ValueError, match="over the limit"):
        store.set("a", bytes(1 << 20))
    with pytest.raises(StoreRefusedError, match=r"full \(100 bytes"):
        store.set("a", bytes(101))
    store.set("a", bytes(90))
    store.set("a", bytes(10))
    store.set("b", bytes(90))
    store.add("c", 1)
    with pytest.raises(StoreRefusedError, match=r"full \(3 keys"):
        store.set("d", b"")
    with pytest.raises(StoreRefusedError, match="at most 1024 characters"):
        store.set("k" * 1025, b"")
    with pytest.raises(StoreRefusedError, match="unknown operation"):
        store._request("explode", "x")
    assert store.get("b", 1.0) == bytes(90)
    store.close()


def test_all_ranks_get_all_payloads_again_and_again(shared: Callable[[], Store]) -> None:
    for generation in range(3):

        def rank(r: int, generation: int = generation) -> list[bytes]:
            time.sleep(0.02 * ((r + generation) % 3))
            return exchange(shared(), "group", r, 5, b"%d of %d" % (r, generation), soon())

        for got in together(*[lambda r=r: rank(r) for r in range(5)]):
            assert got == [b"%d of %d" % (r, generation) for r in range(5)]


def test_a_fast_rank_can_start_its_next_group_while_others_form_the_first() -> None:
    store = MemoryStore()

    def fast() -> list[list[bytes]]:
        return [exchange(store, "g", 0, 2, b"fast %d" % i, soon()) for i in range(2)]

    def slow() -> list[list[bytes]]:
        time.sleep(0.3)
        first = exchange(store, "g", 1, 2, b"slow 0", soon())
        time.sleep(0.3)
        return [first, exchange(store, "g", 1, 2, b"slow 1", soon())]

    expected = [[b"fast 0", b"slow 0"], [b"fast 1", b"slow 1"]]
    assert together(fast, slow) == [expected, expected]


def test_the_deadline_names_who_did_not_come() -> None:
    store = MemoryStore()
    outcomes = together(*[lambda r=r: exchange(store, "g", r, 5, b"", soon(0.5)) for r in (0, 2)])
    for rank, outcome in zip((0, 2), outcomes, strict=True):
        assert isinstance(outcome, RendezvousError)
        assert f"rank {rank} waited in vain for rank 1, 3, 4; 2 of 5 came" in str(outcome)


def test_a_second_process_of_one_rank_is_hinted_at() -> None:
    store = MemoryStore()
    together(*[lambda r=r: exchange(store, "g", r, 2, b"", soon()) for r in (0, 1)])
    with pytest.raises(
        RendezvousError,
        match=r"rank 0 to start for the 2\. time \(unless another process, too, says that it is rank 1\)",
    ):
        exchange(store, "g", 1, 2, b"", soon(0.3))


def test_progress_is_seen_without_any_logging_set_up(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_NEWS", 0.2)
    monkeypatch.setattr(rendezvous, "MORE_NEWS", 0.3)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    store = MemoryStore()

    def late() -> list[bytes]:
        time.sleep(0.9)
        return exchange(store, "g", 3, 4, b"3", soon())

    def punctual(r: int) -> list[bytes]:
        deadline = soon(120.0)
        progress = Progress(r, deadline)
        progress.speaks = r == 0
        return exchange(store, "g", r, 4, b"%d" % r, deadline, progress)

    got = together(*[lambda r=r: punctual(r) for r in range(3)], late)
    assert got == [[b"0", b"1", b"2", b"3"]] * 4
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "hostring: rank 0 waits for rank 3 (3 of 4 here, 0 s of 120 s)"
    assert 2 <= len(lines) <= 4


def test_a_long_list_of_the_missing_is_shortened() -> None:
    assert rendezvous.names([3, 1]) == "rank 1, 3"
    assert rendezvous.names(range(20)) == "rank 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 4 more"


def test_what_inspect_refuses_is_refused_everywhere() -> None:
    store = MemoryStore()

    def inspect(rank: int, payload: bytes) -> None:
        if payload == b"bad":
            raise HandshakeError("rank 1 is bad")

    outcomes = together(
        lambda: exchange(store, "g", 0, 3, b"good", soon(), inspect=inspect),
        lambda: exchange(store, "g", 1, 3, b"bad", soon()),
    )
    assert [type(outcome) for outcome in outcomes] == [HandshakeError, HandshakeError]
    assert all("rank 1 is bad" in str(outcome) for outcome in outcomes)


def hosted(rank: int, port: int, **kwargs: Any) -> Config:
    return Config(rank=rank, world_size=3, store_host="127.0.0.1", store_port=port, secret=SECRET, **kwargs)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_twenty_groups_one_after_the_other_on_one_port() -> None:
    """Rank 0 opens and closes the store each time; the others are now faster, now slower, and find the old one still there."""
    port = free_port()

    def rank(r: int) -> list[list[bytes]]:
        collected = []
        for i in range(20):
            deadline = soon(30.0)
            store, close = open_store(hosted(r, port), deadline, Progress(r, deadline))
            collected.append(exchange(store, "g", r, 3, b"%d.%d" % (r, i), deadline))
            if r == 0:
                rendezvous.linger(store, "g", 3)
            time.sleep(0.001 * ((7 * r + 3 * i) % 11))
            close()
        return collected

    threads = threading.active_count()
    for got in together(*[lambda r=r: rank(r) for r in range(3)]):
        assert got == [[b"%d.%d" % (r, i) for r in range(3)] for i in range(20)]
    assert threading.active_count() == threads


def test_two_groups_at_once_share_the_store_of_one_port() -> None:
    port = free_port()
    deadline = soon()
    first, close_first = open_store(hosted(0, port), deadline, Progress(0, deadline))
    second, close_second = open_store(hosted(0, port), deadline, Progress(0, deadline))
    first.set("a", b"b")
    close_first()
    assert second.get("a", 1.0) == b"b"
    close_second()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_a_port_in_use_is_reported_at_once() -> None:
    taken = listen("127.0.0.1", 0)
    deadline = soon()
    with pytest.raises(RendezvousError, match=r"port \d+ of 127.0.0.1 is in use; choose another MASTER_PORT"):
        open_store(hosted(0, taken.getsockname()[1]), deadline, Progress(0, deadline))
    taken.close()


def test_localhost_is_served_on_both_loopback_addresses() -> None:
    """One host resolves ::1, the other 127.0.0.1: they must meet nevertheless."""
    port = free_port()
    deadline = soon()
    _, close = open_store(
        Config(world_size=2, store_host="localhost", store_port=port, secret=SECRET), deadline, Progress(0, deadline)
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
            store, close = open_store(Config(rank=r, world_size=2, job="j"), deadline, Progress(r, deadline))
            collected.append(exchange(store, "g", r, 2, b"%d.%d" % (r, i), deadline))
            if r == 0:
                rendezvous.linger(store, "g", 2)
            close()
        return collected

    for got in together(lambda: rank(0), lambda: rank(1)):
        assert got == [[b"%d.%d" % (r, i) for r in range(2)] for i in range(5)]
    assert os.listdir(tmp_path / os.listdir(tmp_path)[0]) == []


def test_nothing_is_left_of_a_server_and_its_clients() -> None:
    def once() -> None:
        running = StoreServer([listen("127.0.0.1", 0)], SECRET)
        store = client(running)
        store.set("a", b"b")
        waiting = threading.Thread(target=lambda: together(lambda: store.get("never", 30.0)))
        waiting.start()
        time.sleep(0.05)
        running.close()
        running.close()
        waiting.join(10)
        assert not waiting.is_alive()
        store.close()

    once()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        once()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
