"""Pieces of files on their way from the head to a rank: exactly those that are missing, whole, and from nobody else."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hostring.errors import HandshakeError, RendezvousError
from hostring.shipping import extents as cutting
from hostring.shipping import storage
from hostring.shipping.arrival import Arrival, Arrived
from hostring.shipping.channel import Channel, answer, dial
from hostring.shipping.extents import Extent
from hostring.shipping.folder import ModelFolder, ShippedFile
from hostring.shipping.hashes import Hashes
from hostring.shipping.server import ShipServer, listen_on
from hostring.shipping.supplier import Supplier

SECRET = b"of the group"
NBYTES = 300_007


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cutting, "MAX_PIECE_NBYTES", 4096)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "m.bin"
    path.write_bytes(np.random.default_rng(3).integers(0, 256, NBYTES, np.uint8).tobytes())
    return path


@contextlib.contextmanager
def head(original: Path, **options: Any) -> Iterator[ShipServer]:
    server = ShipServer(listen_on(["127.0.0.1"]), SECRET, Hashes([original]), **options)
    try:
        yield server
    finally:
        server.close()


_opened = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    with _opened:
        yield


def arrival(port: int, patience: float = 10.0, local: tuple[Path, ...] = (), **options: Any) -> Arrival:
    folder = ModelFolder(storage.models_home() / "m", [ShippedFile("m.bin", NBYTES, 100)])
    found = Arrival(folder, Supplier([("127.0.0.1", port)], SECRET, 1, patience=patience), local, **options)
    _opened.callback(found.close)
    return found


WANTED = [Extent(0, 0, 100), Extent(0, 5_000, 90_000), Extent(0, 100_000, 700, 2_000, 50), Extent(0, 30_000, 200)]


def indices(extent: Extent) -> set[int]:
    return {extent.offset + n * extent.stride + k for n in range(extent.count) for k in range(extent.width)}


def check(here: Path, original: Path, wanted: list[Extent]) -> None:
    """All that is wanted is there, and nothing but that."""
    got, want = (np.fromfile(path, np.uint8) for path in (here, original))
    there = sorted(set().union(*map(indices, wanted)))
    assert (got[there] == want[there]).all()
    rest = np.delete(got, there)
    assert not rest.any()


def test_planned_shipped_and_read_are_the_same_bytes(original: Path) -> None:
    with head(original) as server:
        rank = arrival(server.port)
        rank.plan(WANTED)
        for extent in WANTED:
            rank.read([extent])
        nbytes = len(set().union(*map(indices, WANTED)))
        assert rank.account() == Arrived(planned=nbytes, read=nbytes, shipped=nbytes)
        assert (server.sent()[1].sent, server.sent()[1].planned) == (nbytes, nbytes)
        check(rank.folder.path_of(0), original, WANTED)


def test_what_was_not_planned_comes_when_it_is_read(original: Path) -> None:
    with head(original) as server:
        rank = arrival(server.port)
        rank.read([Extent(0, 7, 9_000)])
        check(rank.folder.path_of(0), original, [Extent(0, 7, 9_000)])
        assert rank.account() == Arrived(read=9_000, shipped=9_000)


def test_the_cache_is_used_and_damage_in_it_is_noticed(original: Path, caplog: pytest.LogCaptureFixture) -> None:
    with head(original) as server:
        first = arrival(server.port)
        first.plan(WANTED)
        again = arrival(server.port)
        again.plan(WANTED)
        nbytes = first.arrived.planned
        assert again.arrived == Arrived(planned=nbytes, cached=nbytes)
        path = again.folder.path_of(0)
        with path.open("r+b") as file:
            file.seek(50_000)
            byte = file.read(1)[0]
            file.seek(50_000)
            file.write(bytes([byte ^ 4]))
        flipped = arrival(server.port)
        flipped.plan(WANTED)
        assert (flipped.arrived.damaged, flipped.arrived.shipped) == (1, 4096)
        assert "is damaged at byte 49152" in caplog.text
        check(path, original, WANTED)
        os.truncate(path, 60_000)
        whole = arrival(server.port)
        whole.plan(WANTED)
        assert whole.arrived.shipped == nbytes
        check(path, original, WANTED)


def test_a_model_that_has_changed_at_the_head_comes_again(original: Path) -> None:
    with head(original) as server:
        arrival(server.port).plan(WANTED)
    data = bytearray(original.read_bytes())
    data[20_000] ^= 1
    original.write_bytes(bytes(data))
    os.utime(original, ns=(1, 1))
    with head(original) as server:
        rank = arrival(server.port)
        rank.plan(WANTED)
        assert rank.arrived.shipped == 4096
        check(rank.folder.path_of(0), original, WANTED)


def test_a_file_of_its_own_is_read_where_it_is_the_same(original: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.bin"
    data = bytearray(original.read_bytes())
    data[20_000] ^= 1
    mine.write_bytes(bytes(data))
    with head(original) as server:
        rank = arrival(server.port, local=(mine,))
        rank.plan(WANTED)
        assert rank.arrived.shipped == 4096
        assert rank.arrived.local == rank.arrived.planned - 4096
        check(rank.folder.path_of(0), original, WANTED)


def test_a_broken_connection_costs_no_more_than_a_piece(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostring.shipping.supplier.PAUSE_S", 0.01)
    breaks, sent = [50, 20], list[int]()
    plain = Channel.send

    def send(self: Channel, value: Any, body: bytes = b"") -> None:
        if body and breaks and len(sent) == breaks[-1]:
            breaks.pop()
            plain(self, value, body[: len(body) // 2])
            raise ConnectionResetError("the link is down")
        if body:
            sent.append(len(body))
        plain(self, value, body)

    monkeypatch.setattr(Channel, "send", send)
    with head(original) as server:
        rank = arrival(server.port)
        rank.plan([Extent(0, 0, NBYTES)])
        assert rank.arrived.shipped == sum(sent) == NBYTES
        assert server.sent()[1].sent == NBYTES
        assert rank.folder.path_of(0).read_bytes() == original.read_bytes()


def test_a_start_that_was_ended_goes_on_where_it_was(original: Path) -> None:
    class Killed(BaseException):
        pass

    def until_half(arrived: Arrived) -> None:
        if arrived.shipped > NBYTES / 2:
            raise Killed

    with head(original) as server:
        first = arrival(server.port, progress=until_half)
        with pytest.raises(Killed):
            first.plan([Extent(0, 0, NBYTES)])
        second = arrival(server.port)
        second.plan([Extent(0, 0, NBYTES)])
        assert second.arrived.cached == first.arrived.shipped > NBYTES / 2
        assert second.arrived.shipped == NBYTES - first.arrived.shipped


def test_a_head_that_stays_away_is_an_error_that_says_what_is_missing(original: Path) -> None:
    with head(original) as server:
        port = server.port
    rank = arrival(port, patience=0.0)
    with pytest.raises(RendezvousError, match="74 pieces are missing"):
        rank.plan([Extent(0, 0, NBYTES)])


def test_strangers_get_nothing(original: Path) -> None:
    with head(original) as server:
        with pytest.raises((HandshakeError, RendezvousError)):
            Supplier([("127.0.0.1", server.port)], b"another", 1, patience=0.0).fetch([(WANTED[0], None)], 1).__next__()
        assert server.sent() == {}
        with socket.create_connection(("127.0.0.1", server.port), 5) as sock:
            sock.settimeout(10)
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 40)
            sock.recv(4096)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(4096) == b""
        rank = arrival(server.port)
        rank.plan(WANTED)


@pytest.mark.parametrize("numbers", [[0, 0, NBYTES + 1, 0, 1], [0, -1, 5, 0, 1], [1, 0, 5, 0, 1], [0, 0, 5, 0], ["x"]])
def test_nonsense_ends_a_connection_and_nothing_else(original: Path, numbers: Any) -> None:
    with head(original) as server:
        with socket.create_connection(("127.0.0.1", server.port), 5) as sock:
            sock.settimeout(10)
            channel = dial(sock, SECRET)
            channel.send({"rank": 1, "host": "h", "planned": 1, "starts": True, "pieces": [[numbers, None]]})
            with pytest.raises(ConnectionError):
                channel.receive()
        arrival(server.port).plan(WANTED)


def test_a_message_that_was_changed_on_its_way_is_noticed() -> None:
    class Changing:
        """A socket that changes a byte of what is sent from the third message on."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock, self.messages = sock, 0

        def sendall(self, data: bytes) -> None:
            self.messages += 1
            self.sock.sendall(data if self.messages < 3 else data[:6] + bytes([data[6] ^ 1]) + data[7:])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

    a, b = socket.socketpair()
    ends: list[Channel] = []
    thread = threading.Thread(target=lambda: ends.append(answer(a, SECRET)))
    thread.start()
    rank = dial(Changing(b), SECRET)  # type: ignore[arg-type]
    thread.join(10)
    for value in ("as it is", "changed"):
        rank.send(value)
    assert ends[0].receive() == "as it is"
    with pytest.raises(HandshakeError, match="was changed"):
        ends[0].receive()
    a.close()
    b.close()


def test_a_full_disk_is_said_before_it_is_full(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5000))
    with head(original) as server:
        rank = arrival(server.port)
        with pytest.raises(OSError, match=r"too full: .* need 0\.3 MB more and 0\.0 MB are free.*cache prune"):
            rank.plan([Extent(0, 0, NBYTES)])
        assert rank.arrived.shipped == 0


def test_the_cache_is_bounded_and_what_is_in_use_stays(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTRING_CACHE_GB", "0.0012")  # 1.2 MB
    for age, name in enumerate(("oldest", "older", "held")):
        folder = storage.models_home() / name
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(bytes(400_000))
        os.utime(folder / "data", (1000.0 + age, 1000.0 + age))
    held = storage.locked(storage.models_home() / "oldest")
    with held, head(original) as server:
        rank = arrival(server.port)
        rank.plan([Extent(0, 0, NBYTES)])
        left = {model.folder.name for model in storage.cached_models()}
        assert "oldest" in left
        assert "m" in left
        assert "older" not in left
        monkeypatch.setenv("HOSTRING_CACHE_GB", "0.0001")
        with pytest.raises(OSError, match=r"may have 0\.1 MB; set HOSTRING_CACHE_GB"):
            arrival(server.port, local=()).read([Extent(0, 0, NBYTES - 1)])


def test_the_progress_of_the_head_names_the_rank(original: Path) -> None:
    told: list[str] = []
    with head(original, progress=lambda sent: told.append(str(sent))) as server:
        arrival(server.port).plan([Extent(0, 0, NBYTES)])
    assert told[-1].startswith("rank 1 (")
    assert told[-1].endswith("sent 0.3 of 0.3 MB")
