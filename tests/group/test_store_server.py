"""The TCP store: its secret, its limits, its strangers, and answers that are lost."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from at_a_store import SECRET, RawClient, client, soon
from ranks import side_by_side

from hostring.rendezvous import StoreRefusedError, TcpStore
from hostring.store import server as store_server
from hostring.store.protocol import framed, prove
from hostring.store.server import StoreServer
from hostring.transports.tcp import listen_at


@pytest.fixture
def server() -> Iterator[StoreServer]:
    running = StoreServer([listen_at("127.0.0.1", 0)], SECRET)
    yield running
    running.close()


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
    listener = listen_at("127.0.0.1", 0)
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


def test_answers_are_remembered_for_a_repetition_and_not_for_ever(server: StoreServer) -> None:
    raw = RawClient(server.port)
    assert raw.ask(1, "add", "n", 1) == 1
    assert raw.ask(1, "add", "n", 1) == 1
    for number in range(2, 2 + store_server.MAX_ANSWERS_REMEMBERED):
        assert raw.ask(number, "add", "n", 1) == number
    assert raw.ask(number, "add", "n", 1) == number
    assert raw.ask(1, "add", "n", 1) == number + 1
    raw.close()


def test_a_store_that_was_started_anew_says_so() -> None:
    first = StoreServer([listen_at("127.0.0.1", 0)], SECRET)
    port = first.port
    store = client(first, deadline=soon())
    store.set("a", b"b")
    first.close()
    second = StoreServer([listen_at("127.0.0.1", port)], SECRET)
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
    threading.Timer(0.4, lambda: late.append(StoreServer([listen_at("127.0.0.1", port)], SECRET))).start()
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
        socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(store_server.MAX_STRANGERS * 2)
    ]
    store = client(server)
    started = time.monotonic()
    store.set("a", b"b")
    assert time.monotonic() - started < 2.0
    assert len(server._strangers) <= store_server.MAX_STRANGERS
    for sock in silent:
        sock.close()
    store.close()


def test_a_silent_stranger_is_dropped(monkeypatch: pytest.MonkeyPatch, server: StoreServer) -> None:
    monkeypatch.setattr(store_server, "HELLO_S", 0.2)
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
    monkeypatch.setattr(store_server, "MAX_KEYS", 3)
    monkeypatch.setattr(store_server, "MAX_VALUES_BYTES", 100)
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


def test_nothing_is_left_of_a_server_and_its_clients() -> None:
    def once() -> None:
        running = StoreServer([listen_at("127.0.0.1", 0)], SECRET)
        store = client(running)
        store.set("a", b"b")
        waiting = threading.Thread(target=lambda: side_by_side([lambda: store.get("never", 30.0)]))
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
