"""Strangers that dial a rank while its group starts are dropped, and do not delay the start."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from forming import CONTRACT, close_all, configs, everyone, talk
from ranks import side_by_side

from hostring.errors import HandshakeError
from hostring.group import accepting, greeting
from hostring.group.connecting import Connecting
from hostring.group.group import connect
from hostring.group.handshake import Hello, dial
from hostring.group.peer_info import Entry
from hostring.group.roster import Roster
from hostring.store.protocol import framed

pytestmark = pytest.mark.usefixtures("own_folder")


class OpenStart:
    """Three ranks start. Rank 2 has published itself but makes no links before `finish`: 0 and 1 keep listening."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.release = threading.Event()
        self.sent_to_0: list[bytes] = []
        real_run, real_send = Connecting.run, greeting.send

        def held(work: Connecting, *until: Any) -> None:
            if work.greeted.hello.rank == 2:
                self.release.wait(30)
            real_run(work, *until)

        async def tapped(sock: socket.socket, data: bytes, until: float) -> None:
            if sock.getpeername() == self.address:
                self.sent_to_0.append(data)
            await real_send(sock, data, until)

        monkeypatch.setattr(Connecting, "run", held)
        monkeypatch.setattr(greeting, "send", tapped)
        self.address = ("", 0)
        three = configs(3, **changes)
        self.groups: list[Any] = []
        jobs = [lambda c=c: connect(c, neighbours=everyone, contract=CONTRACT) for c in three]
        self.thread = threading.Thread(target=lambda: self.groups.extend(side_by_side(jobs)), daemon=True)
        store = three[0].store
        published = store.set

        def see(key: str, value: bytes) -> None:
            if key == "world/0/1/0":
                self.address = next(a for a in Entry.from_bytes(0, value).info.addresses if a[0] == "127.0.0.1")
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
    strangers = [open_start.stranger(b"\x10") for _ in range(accepting.MAX_STRANGERS + 50)]
    strangers[0].settimeout(greeting.HELLO_S / 2)  # it has not had its time, and is dropped all the same
    assert strangers[0].recv(1) == b""
    assert open_start.finish() < 4.0
    for sock in strangers:
        sock.close()


def test_a_silent_stranger_is_dropped_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(greeting, "HELLO_S", 0.5)
    monkeypatch.setattr(accepting, "HELLO_S", 0.5)
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
    hello = replace(honest.hello, **{"kind": "control", **change})
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
    with open_start.stranger(open_start.sent_to_0[0]) as sock:
        assert set(msgpack.unpackb(read_frame(sock))) == {"refused", "why"}
        with pytest.raises(EOFError):
            read_frame(sock)
    open_start.finish()
