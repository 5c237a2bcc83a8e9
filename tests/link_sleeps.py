"""What every link must do for a thread that sleeps in `poll` until it has work."""

from __future__ import annotations

import select
import threading
import time
from typing import Any

import pytest
from link_ends import DEADLINE, LEFT, Pair, receive, send_all, until

from hostring.errors import PeerLostError


def check_abort_wakes_poll(pair: Pair) -> None:
    """`abort` in another thread ends a `poll` on that very link, and what follows raises."""
    left, right = pair
    poll = select.poll()
    poll.register(left.fileno(), left.arm(True, False))
    assert left.recv_into(bytearray(1)) == 0
    aborter = threading.Timer(0.1, left.abort)
    aborter.start()
    started = time.monotonic()
    assert poll.poll(DEADLINE * 1000)
    assert time.monotonic() - started < DEADLINE / 2
    aborter.join()
    with pytest.raises(PeerLostError):
        left.recv_into(bytearray(1))
    with pytest.raises(PeerLostError):
        left.send([b"x"])
    with pytest.raises(PeerLostError) as lost:
        until(lambda: right.recv_into(bytearray(1)), "the abort at the other end")
    assert lost.value.rank == LEFT


def check_poll_for_input(pair: Pair) -> None:
    """Asleep in `poll`, woken by what the other end sends; arming again sleeps again."""
    left, right = pair
    for word in (b"one", b"two", b"three"):
        poll = select.poll()
        poll.register(right.fileno(), right.arm(True, False))
        assert right.recv_into(bytearray(8)) == 0
        assert poll.poll(20) == []
        sender = threading.Timer(0.05, send_all, (left, word))
        sender.start()
        assert poll.poll(DEADLINE * 1000)
        assert receive(right, len(word)) == word
        sender.join()


def check_poll_for_room(pair: Pair) -> None:
    """Asleep with a full pipe, woken when the other end reads."""
    left, right = pair
    sent = 0
    while n := left.send([bytes(1 << 16)]):
        sent += n
    poll = select.poll()
    poll.register(left.fileno(), left.arm(False, True))
    if n := left.send([bytes(1 << 16)]):
        pytest.fail(f"a full pipe took {n} bytes")
    assert poll.poll(20) == []
    reader = threading.Timer(0.05, receive, (right, sent))
    reader.start()
    assert poll.poll(DEADLINE * 1000)
    assert until(lambda: left.send([bytes(1 << 16)]), "room in the pipe") > 0
    reader.join()


def check_no_lost_wakeup(pair: Pair) -> None:
    """Ping-pong that sleeps whenever nothing is there: one missed doorbell and it stands still."""
    rounds = 400
    failures: list[BaseException] = []

    def wait_for(link: Any, recv: bool) -> bytes | int:
        got = bytearray(1)
        while True:
            if recv and link.recv_into(got):
                return bytes(got)
            poll = select.poll()
            poll.register(link.fileno(), link.arm(recv, False))
            if recv and link.recv_into(got):
                return bytes(got)
            assert poll.poll(DEADLINE * 1000), "asleep for ever"

    def play(link: Any, first: bool) -> None:
        try:
            for i in range(rounds):
                mine = bytes([i % 251])
                if first:
                    send_all(link, mine)
                assert wait_for(link, True) == mine
                if not first:
                    send_all(link, mine)
        except BaseException as exc:
            failures.append(exc)

    threads = [
        threading.Thread(target=play, args=(pair[0], True)),
        threading.Thread(target=play, args=(pair[1], False)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
