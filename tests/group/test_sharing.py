"""Ranks of one host agree on shared memory, or keep their sockets and say why."""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from link_ends import LEFT, RIGHT, receive
from shm_links import DATA, DEADLINE, footprint, shared, socket_pair

from hostring.errors import RendezvousError
from hostring.transports import mapping, memory_order, sharing
from hostring.transports.mapping import PAGE
from hostring.transports.shm import ShmLink

pytestmark = pytest.mark.skipif(bool(memory_order.unsupported()), reason=memory_order.unsupported())


def fails(*args: Any) -> Any:
    raise OSError("no memory here")


def test_a_rank_that_can_make_no_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hostring")
    monkeypatch.setattr(sharing, "create", fails)
    assert shared(PAGE) == ({}, {})
    assert any("no memory here" in message for message in caplog.messages)
    assert any("rank 3" in message and "the peer offers none" in message for message in caplog.messages)


@pytest.mark.parametrize("fails_for_dialler", [True, False])
def test_memory_that_does_not_show_what_the_other_wrote_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fails_for_dialler: bool
) -> None:
    read = sharing._read_nonce
    monkeypatch.setattr(
        sharing, "_read_nonce", lambda pair, side: b"?" * 24 if pair.dialled is fails_for_dialler else read(pair, side)
    )
    before = footprint()
    assert shared(PAGE) == ({}, {})
    assert footprint() == before


def test_a_rank_that_can_not_map_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = sharing._map
    monkeypatch.setattr(
        sharing, "_map", lambda pair, fd, capacity: mapped(pair, fd, capacity) if pair.dialled else fails()
    )
    assert shared(PAGE) == ({}, {})


def test_sockets_without_shared_memory_are_as_good_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "create", fails)
    dialled, accepted = socket_pair()
    end = time.monotonic() + DEADLINE
    other = threading.Thread(target=sharing.share, args=({(LEFT, "data"): accepted}, [], end))
    other.start()
    assert sharing.share({DATA: dialled}, [DATA], end) == {}
    other.join()
    dialled.send(b"payload")
    assert accepted.recv(100) == b"payload"
    dialled.close()
    accepted.close()


def test_all_links_of_a_rank_at_once() -> None:
    """Four ranks, every pair with two links, each rank in its own order."""
    wires = {(a, b, kind): socket_pair() for a in range(4) for b in range(a) for kind in ("data", "p2p")}
    got: dict[int, dict[sharing.Wire, ShmLink]] = {}
    end = time.monotonic() + DEADLINE

    def form(rank: int) -> None:
        mine = {(b, kind): pair[0] for (a, b, kind), pair in wires.items() if a == rank}
        mine |= {(a, kind): pair[1] for (a, b, kind), pair in wires.items() if b == rank}
        got[rank] = sharing.share(mine, [wire for wire in mine if wire[0] < rank], end, PAGE)

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b, kind in wires:
        word = f"{a}{b}{kind}".encode()
        assert got[a][b, kind].send([word]) == len(word)
        assert receive(got[b][a, kind], len(word)) == word
    for links in got.values():
        assert len(links) == 6
        for link in links.values():
            link.close()


def raw_offer(capacity: int, nbytes: int) -> bytes:
    """Offer, as a stranger would, memory of `nbytes` said to hold rings of `capacity`. Returns the answer."""
    stranger, accepted = socket_pair()
    stranger.setblocking(True)
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    socket.send_fds(stranger, [sharing._OFFER.pack(b"hShm", capacity, bytes(24))], [fd])
    stranger.sendall(sharing._VERDICT.pack(b"hShm", b"no.."))
    os.close(fd)
    assert sharing.share({DATA: accepted}, [], time.monotonic() + DEADLINE) == {}
    answer = stranger.recv(100)
    stranger.close()
    accepted.close()
    return answer[4:8]


@pytest.mark.parametrize(
    ("capacity", "nbytes"), [(0, PAGE), (3, 1 << 20), (PAGE + 1, 1 << 20), (1 << 20, 1 << 20), (1 << 31, PAGE)]
)
def test_an_offer_that_can_not_be_right_is_declined(capacity: int, nbytes: int) -> None:
    before = footprint()
    assert raw_offer(capacity, nbytes) == b"no.."
    assert footprint() == before
    assert raw_offer(PAGE, 3 * PAGE) == b"yes."


@pytest.mark.parametrize("dials", [True, False])
def test_a_peer_that_stays_silent_leaves_or_talks_nonsense_is_named(dials: bool) -> None:
    def outcome(speak: Callable[[socket.socket], None], seconds: float) -> str:
        ours, theirs = socket_pair()
        speak(theirs)
        with pytest.raises(RendezvousError) as failed:
            sharing.share({DATA: ours}, [DATA] if dials else [], time.monotonic() + seconds, PAGE)
        assert failed.value.rank == RIGHT
        ours.close()
        theirs.close()
        return str(failed.value)

    before = footprint()
    assert "by the deadline" in outcome(lambda sock: None, 0.1)
    assert "left while links were made" in outcome(lambda sock: sock.close(), DEADLINE)
    assert "does not speak of shared memory" in outcome(lambda sock: sock.sendall(bytes(64)), DEADLINE)
    assert footprint() == before


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64", "arm64"])
def test_machines_whose_memory_order_is_known_are_used(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert memory_order.unsupported() == ""


@pytest.mark.parametrize("machine", ["riscv64", "ppc64le", "i686"])
def test_machines_whose_memory_order_is_unknown_are_refused(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert machine in memory_order.unsupported()


def test_one_word_is_one_access() -> None:
    """The words are aligned, eight bytes wide, native, and no two of them share what a CPU fetches at once."""
    memory = mmap.mmap(-1, PAGE)
    words = memoryview(memory).cast("Q")
    assert (words.itemsize, words.format) == (8, "Q")
    each = (mapping.WRITTEN, mapping.READ, mapping.READER_SLEEPS, mapping.WRITER_SLEEPS)
    used = [direction * mapping.DIRECTION + word for direction in (0, 1) for word in each]
    assert min(b - a for a, b in itertools.pairwise(used)) * 8 >= 128
    assert (max(used) + 16) * 8 <= min(mapping.NONCES)
    words.release()
    memory.close()
