"""What every link must do, whatever carries it. Each transport's tests call these `check_*` functions with two ends.

The checks of sleeping ends are in `link_sleeps.py`.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import link_sleeps
import pytest
from link_ends import DEADLINE, LEFT, RIGHT, Pair, noise, receive, send_all, until

from hostring.errors import PeerLostError


def check_names(pair: Pair) -> None:
    left, right = pair
    assert (left.peer, right.peer) == (RIGHT, LEFT)
    assert left.fileno() >= 0
    assert left.fileno() != right.fileno()


def check_nothing_there(pair: Pair) -> None:
    for link in pair:
        assert link.recv_into(bytearray(10)) == 0
        assert link.recv_into_all([bytearray(10), bytearray(3)]) == 0


def check_both_directions(pair: Pair) -> None:
    left, right = pair
    send_all(left, b"to the right")
    send_all(right, b"to the left, which is longer")
    assert receive(right, 12) == b"to the right"
    assert receive(left, 28) == b"to the left, which is longer"


def check_gather_and_scatter(pair: Pair) -> None:
    left, right = pair
    assert left.send([b"head", bytearray(b"body of it"), memoryview(b"")]) == 14
    parts = [bytearray(3), bytearray(0), bytearray(9), bytearray(5)]
    n = 0

    def step() -> bool:
        nonlocal n
        n += right.recv_into_all(skip(parts, n))
        return n == 14

    until(step, "scattering 14 bytes")
    assert parts == [bytearray(b"hea"), bytearray(), bytearray(b"dbody of "), bytearray(b"it\0\0\0")]


def skip(parts: list[bytearray], nbytes: int) -> list[memoryview]:
    """Views of `parts` without their first `nbytes`."""
    views = []
    for part in parts:
        cut = min(nbytes, len(part))
        views.append(memoryview(part)[cut:])
        nbytes -= cut
    return views


def check_zero_length(pair: Pair) -> None:
    left, right = pair
    assert left.send([]) == 0
    assert left.send([b"", memoryview(bytearray())]) == 0
    send_all(left, b"x")
    assert right.recv_into(bytearray()) == 0
    assert right.recv_into_all([bytearray(), bytearray()]) == 0
    assert receive(right, 1) == b"x"
    assert right.recv_into(bytearray()) == 0


def check_typed_views(pair: Pair) -> None:
    """A view of wider elements counts in bytes."""
    left, right = pair
    numbers = memoryview(bytearray(range(64))).cast("I")
    assert left.send([numbers]) == 64
    got = bytearray(64)
    target = memoryview(got).cast("Q")
    until(lambda: right.recv_into(target) == 64, "64 bytes into a view of 8 elements")
    assert got == bytes(range(64))


def check_back_pressure(pair: Pair) -> None:
    """A pipe that nobody empties takes a bounded amount, then nothing; emptied, it takes more, and nothing is lost."""
    left, right = pair
    chunk = noise(1 << 16)
    sent = 0
    while n := left.send([memoryview(chunk)[sent % len(chunk) :]]):
        sent += n
        assert sent < 1 << 28, "no back pressure after 256 MB"
    assert sent > 0
    assert left.send([memoryview(chunk)[sent % len(chunk) :]]) == 0
    got = receive(right, sent)
    assert got == (chunk * (sent // len(chunk) + 1))[:sent]
    rest = chunk[sent % len(chunk) :]
    taken = until(lambda: left.send([rest]), "room after the pipe was emptied")
    assert receive(right, taken) == rest[:taken]


def check_large_stream(pair: Pair) -> None:
    """Both ends send 5 MB at once from one thread each, over pipes that hold less, in uneven pieces."""
    outcome: dict[int, bytes] = {}

    def exchange(link: Any, mine: bytes, seed: int) -> None:
        rng = random.Random(seed)
        out, got = memoryview(mine), bytearray(len(mine))
        into = memoryview(got)
        end = time.monotonic() + DEADLINE
        while (out or into) and time.monotonic() < end:
            n = rng.randrange(1, 300_000)
            sent = link.send([out[: n // 3], out[n // 3 : n]]) if out else 0
            out = out[sent:]
            n = rng.randrange(1, 300_000)
            came = link.recv_into_all([into[: n // 2], into[n // 2 : n]]) if into else 0
            into = into[came:]
            if not sent and not came:
                time.sleep(0.0002)
        outcome[link.peer] = bytes(got)

    data = {RIGHT: noise(5_000_001, 7), LEFT: noise(5_000_001, 8)}  # by the peer of who sends
    threads = [threading.Thread(target=exchange, args=(link, data[link.peer], link.peer)) for link in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcome[RIGHT] == data[LEFT]
    assert outcome[LEFT] == data[RIGHT]


def check_end_names_the_peer(pair: Pair) -> None:
    left, right = pair
    left.close()
    with pytest.raises(PeerLostError, match=f"rank {LEFT} is lost") as lost:
        until(lambda: right.recv_into(bytearray(1)), "the end of the stream")
    assert lost.value.rank == LEFT
    with pytest.raises(PeerLostError, match=f"rank {LEFT} is lost"):
        right.recv_into_all([bytearray(1), bytearray(1)])
    assert isinstance(lost.value, ConnectionError)


def check_send_to_closed(pair: Pair) -> None:
    left, right = pair
    left.close()
    with pytest.raises(PeerLostError) as lost:
        until(lambda: right.send([noise(1 << 16)]) < 0, "an error from sending to a closed link")
    assert lost.value.rank == LEFT


def check_close_delivers(pair: Pair) -> None:
    """What `send` took before `close` arrives, even when unread input was waiting at the closing end."""
    left, right = pair
    send_all(right, b"never read")
    until(lambda: left.recv_into(bytearray(1)), "input at the left end")
    data = noise(100_000, 3)
    taken = left.send([data])
    left.close()
    assert receive(right, taken) == data[:taken]
    with pytest.raises(PeerLostError):
        until(lambda: right.recv_into(bytearray(1)), "the end of the stream")


def check_close_twice(pair: Pair) -> None:
    for link in pair:
        link.close()
        link.close()
        link.abort()
        assert link.fileno() == -1
        with pytest.raises(PeerLostError):
            link.recv_into(bytearray(1))
        with pytest.raises(PeerLostError):
            link.send([b"x"])


def check_close_does_not_wait(pair: Pair) -> None:
    """A peer that reads nothing can't hold up `close`."""
    left, _ = pair
    while left.send([bytes(1 << 16)]):
        pass
    started = time.monotonic()
    left.close()
    assert time.monotonic() - started < 2.0


CHECKS = [
    check
    for checks in (globals(), vars(link_sleeps))
    for name, check in sorted(checks.items())
    if name.startswith("check_")
]
