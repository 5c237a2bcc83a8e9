from __future__ import annotations

import itertools
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import link_contract
import numpy as np
import pytest
from link_contract import LEFT, RIGHT, Pair, noise, receive, send_all, until

from hostring.errors import PeerLostError, RendezvousError
from hostring.transports import mapping, sharing, shm
from hostring.transports.mapping import PAGE
from hostring.transports.shm import ShmLink

pytestmark = pytest.mark.skipif(bool(shm.unsupported()), reason=shm.unsupported())

DEADLINE = 20.0
DATA = (RIGHT, "data")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    socks = socket.socketpair()
    for sock in socks:
        sock.setblocking(False)
    return socks


def shared(capacity: int) -> tuple[dict[sharing.Wire, ShmLink], dict[sharing.Wire, ShmLink]]:
    """What `share` gives two ranks that share one link."""
    dialled, accepted = socket_pair()
    end = time.monotonic() + DEADLINE
    theirs: list[dict[sharing.Wire, ShmLink]] = []
    other = threading.Thread(target=lambda: theirs.append(sharing.share({(LEFT, "data"): accepted}, [], end, capacity)))
    other.start()
    ours = sharing.share({DATA: dialled}, [DATA], end, capacity)
    other.join()
    if not ours:
        dialled.close()
    if not theirs[0]:
        accepted.close()
    return ours, theirs[0]


def shm_pair(capacity: int = PAGE) -> Pair:
    ours, theirs = shared(capacity)
    return ours[DATA], theirs[LEFT, "data"]


@pytest.fixture(params=[PAGE, mapping.CAPACITY], ids=["one_page", "default"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ends = shm_pair(request.param)
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("check", link_contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_link_contract(pair: Pair, check: Callable[[Pair], None]) -> None:
    check(pair)


@pytest.mark.parametrize(
    "check", [link_contract.check_large_stream, link_contract.check_no_lost_wakeup, link_contract.check_poll_for_room]
)
def test_the_barriers_of_weakly_ordered_machines_are_in_place(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[Pair], None]
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(shm, "_WEAK", True)
    monkeypatch.setattr(ShmLink, "_barrier_in", counting(ShmLink._barrier_in, taken))
    monkeypatch.setattr(ShmLink, "_barrier_out", counting(ShmLink._barrier_out, taken))
    ends = shm_pair()
    check(ends)
    assert len(taken) >= 4
    for end in ends:
        end.close()


def counting(method: Callable[[ShmLink], None], taken: list[int]) -> Callable[[ShmLink], None]:
    def counted(self: ShmLink) -> None:
        taken.append(1)
        method(self)

    return counted


@pytest.mark.parametrize("nbytes", [1, 64, 999, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5])
def test_messages_wrap_around_and_exceed_the_ring(nbytes: int) -> None:
    left, right = shm_pair(PAGE)
    for k in range(20):
        data = noise(nbytes, k)
        sender = threading.Thread(target=send_all, args=(left, data))
        sender.start()
        assert receive(right, nbytes) == data
        sender.join()
    left.close()
    right.close()


def test_arrays_go_in_and_come_out_whatever_their_dtype() -> None:
    import ml_dtypes

    left, right = shm_pair()
    sent = np.arange(100).astype(ml_dtypes.bfloat16)
    header, got, head = bytearray(b"head"), np.zeros(100, ml_dtypes.bfloat16), bytearray(4)
    assert left.send((header, sent)) == 204
    assert right.recv_into_all((head, got)) == 204
    assert head == header
    np.testing.assert_array_equal(got.view(np.uint16), sent.view(np.uint16))
    numbers = np.arange(6, dtype=np.complex64).reshape(2, 3)
    back = np.zeros(6, np.complex64)
    assert right.send([numbers]) == 48
    assert left.recv_into(back) == 48
    np.testing.assert_array_equal(back, numbers.reshape(-1))
    left.close()
    right.close()


ECHO = """
import select, socket, sys, time
from hostring.transports import sharing
sock = socket.socket(fileno=int(sys.argv[1]))
sock.setblocking(False)
link = sharing.share({(5, "data"): sock}, [], time.monotonic() + 20, int(sys.argv[2]))[5, "data"]
room = memoryview(bytearray(1 << 16))
while True:
    n = link.recv_into(room)
    if not n:
        poll = select.poll()
        poll.register(link.fileno(), link.arm(True, False))
        if not (n := link.recv_into(room)):
            assert poll.poll(20_000), "asleep for ever"
            continue
    back = room[:n]
    while back:
        back = back[link.send([back]):]
        if back:
            poll = select.poll()
            poll.register(link.fileno(), link.arm(False, True))
            taken = link.send([back])
            back = back[taken:]
            if not taken:
                assert poll.poll(20_000), "asleep for ever"
"""


class Echo:
    """Another process, which sends back what it gets, asleep whenever it can."""

    def __init__(self, capacity: int) -> None:
        ours, theirs = socket_pair()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ECHO, str(theirs.fileno()), str(capacity)], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.link = sharing.share({DATA: ours}, [DATA], time.monotonic() + DEADLINE, capacity)[DATA]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(DEADLINE) == -signal.SIGKILL


@pytest.fixture
def echo(request: pytest.FixtureRequest) -> Iterator[Echo]:
    other = Echo(getattr(request, "param", PAGE))
    yield other
    other.process.kill()
    other.process.wait(DEADLINE)
    other.link.close()


@pytest.mark.parametrize("echo", [PAGE, 1 << 16], indirect=True)
def test_every_byte_arrives_in_order_in_another_process(echo: Echo) -> None:
    """Wakes the other side thousands of times, with rings that are often full and often empty: a lost bell or a byte read early shows."""
    data = noise(3_000_000)
    out, got = memoryview(data), bytearray(len(data))
    into = memoryview(got)
    rng = np.random.default_rng(1)
    sizes = iter(rng.integers(1, 9000, 10**6).tolist())
    end = time.monotonic() + DEADLINE
    while into:
        assert time.monotonic() < end, f"{len(into)} bytes are missing"
        n = next(sizes)
        sent = echo.link.send([out[: n // 2], out[n // 2 : n]]) if out else 0
        out = out[sent:]
        came = echo.link.recv_into(into[:n])
        into = into[came:]
        if not sent and not came and n % 7 == 0:
            time.sleep(0.0001)
    assert got == data


def test_small_messages_to_a_sleeping_process_are_never_slept_through(echo: Echo) -> None:
    for k in range(2000):
        word = k.to_bytes(4, "little")
        assert echo.link.send([word]) == 4
        assert receive_spinning(echo.link, 4) == word


def receive_spinning(link: Any, nbytes: int) -> bytes:
    got = bytearray(nbytes)
    view, end = memoryview(got), time.monotonic() + DEADLINE
    while view:
        view = view[link.recv_into(view) :]
        assert time.monotonic() < end, "nothing came"
    return bytes(got)


def test_a_killed_process_is_noticed_in_any_state(echo: Echo) -> None:
    echo.kill()
    started = time.monotonic()
    with pytest.raises(PeerLostError) as lost:
        receive_spinning(echo.link, 1)
    assert lost.value.rank == RIGHT
    assert time.monotonic() - started < 1.0
    with pytest.raises(PeerLostError):
        echo.link.send([b"x"])


def test_a_killed_process_ends_a_sleep(echo: Echo) -> None:
    def sleep_until_lost() -> None:
        while True:
            poll = select.poll()
            poll.register(echo.link.fileno(), echo.link.arm(True, False))
            assert echo.link.recv_into(bytearray(1)) == 0
            assert poll.poll(DEADLINE * 1000), "asleep for ever"

    killer = threading.Timer(0.1, echo.kill)
    killer.start()
    started = time.monotonic()
    with pytest.raises(PeerLostError):
        sleep_until_lost()
    assert time.monotonic() - started < DEADLINE / 2
    killer.join()


def test_what_a_killed_process_had_sent_is_still_there(echo: Echo) -> None:
    assert echo.link.send([b"last words"]) == 10
    until(lambda: echo.link._words[echo.link._in] == 10, "the echo")
    echo.kill()
    assert receive_spinning(echo.link, 10) == b"last words"
    with pytest.raises(PeerLostError):
        receive_spinning(echo.link, 1)


def footprint() -> tuple[int, int, list[str]]:
    """Descriptors, mappings, and names of ours that could outlive us."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        mapped = sum("memfd:hostring" in line or "/dev/shm" in line for line in file)
    return (
        len(os.listdir("/proc/self/fd")),
        mapped,
        sorted(name for name in os.listdir("/dev/shm") if "tmp" in name or "hostring" in name),
    )


def test_nothing_is_left_whether_links_are_closed_dropped_or_their_peer_is_killed() -> None:
    for end in shm_pair():
        end.close()
    before = footprint()
    for _ in range(5):
        for end in shm_pair():
            end.close()
        shm_pair()
        shm_pair()[0].abort()
        echo = Echo(PAGE)
        echo.link.send([b"x"])
        echo.kill()
        echo.link.close()
    assert footprint() == before


def test_memory_without_a_name_where_memfd_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    before = footprint()
    left, right = shm_pair()
    link_contract.check_large_stream((left, right))
    left.close()
    right.close()
    assert footprint() == before


def test_memory_can_not_be_shortened_under_the_other_end() -> None:
    fd = mapping.create(2 * PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, PAGE)
    os.close(fd)


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
    assert shm.unsupported() == ""


@pytest.mark.parametrize("machine", ["riscv64", "ppc64le", "i686"])
def test_machines_whose_memory_order_is_unknown_are_refused(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert machine in shm.unsupported()


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
