"""Two ends of a link, and what moves bytes between them.

A pair is (left, right): left belongs to rank 3, so right.peer is 3; right belongs to rank 5.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

LEFT, RIGHT = 3, 5


DEADLINE = 20.0


Pair = tuple[Any, Any]


def noise(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Call `condition` until it gives something true; fail after the deadline."""
    end = time.monotonic() + DEADLINE
    while not (got := condition()):
        assert time.monotonic() < end, f"not within {DEADLINE} s: {what}"
        time.sleep(0.0005)
    return got


def send_all(link: Any, data: bytes) -> None:
    view = memoryview(data)

    def step() -> bool:
        nonlocal view
        view = view[link.send([view]) :]
        return not view

    until(step, f"sending {len(data)} bytes")


def receive(link: Any, nbytes: int) -> bytes:
    got = bytearray(nbytes)
    view = memoryview(got)

    def step() -> bool:
        nonlocal view
        view = view[link.recv_into(view) :]
        return not view

    if nbytes:
        until(step, f"receiving {nbytes} bytes")
    return bytes(got)
