"""Links of shared memory: the contract of a link, another process at the other end, its death, and nothing left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import link_contract
import link_sleeps
import numpy as np
import pytest
from link_ends import RIGHT, Pair, noise, receive, send_all, until
from shm_links import DATA, DEADLINE, footprint, shm_pair, socket_pair

from hostring.errors import PeerLostError
from hostring.transports import mapping, memory_order, sharing, shm
from hostring.transports.mapping import PAGE
from hostring.transports.shm import ShmLink

pytestmark = pytest.mark.skipif(bool(memory_order.unsupported()), reason=memory_order.unsupported())


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
    "check", [link_contract.check_large_stream, link_sleeps.check_no_lost_wakeup, link_sleeps.check_poll_for_room]
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
    """Wakes the other side thousands of times, with rings often full and often empty: a lost bell shows."""
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


@pytest.mark.faults
def test_a_killed_process_is_noticed_in_any_state(echo: Echo) -> None:
    echo.kill()
    started = time.monotonic()
    with pytest.raises(PeerLostError) as lost:
        receive_spinning(echo.link, 1)
    assert lost.value.rank == RIGHT
    assert time.monotonic() - started < 1.0
    with pytest.raises(PeerLostError):
        echo.link.send([b"x"])


@pytest.mark.faults
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


@pytest.mark.faults
def test_what_a_killed_process_had_sent_is_still_there(echo: Echo) -> None:
    assert echo.link.send([b"last words"]) == 10
    until(lambda: echo.link._words[echo.link._in] == 10, "the echo")
    echo.kill()
    assert receive_spinning(echo.link, 10) == b"last words"
    with pytest.raises(PeerLostError):
        receive_spinning(echo.link, 1)


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


def test_a_link_that_outlives_its_module_ends_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter empties modules at its end, and prints what a `__del__` raises then."""
    near, far = shm_pair()
    monkeypatch.setattr(shm, "contextlib", None)
    monkeypatch.setattr(shm, "_NO_WORDS", None)
    near.__del__()
    assert near.fileno() == -1
    monkeypatch.undo()
    far.close()
