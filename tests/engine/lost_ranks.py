"""What ranks reduce while one of them is lost, and how that ends for them."""

from __future__ import annotations

import time

import numpy as np

import hostring
from hostring import HostringError

SOON = 10.0  # seconds, on a busy machine; the deadlines of these groups are far beyond


def numbers(rank: int, n_elements: int = 5) -> np.ndarray:
    return np.arange(n_elements, dtype=np.float32) + 10.0**rank


def failure_of(comm: hostring.Comm) -> tuple[str, int | None, float]:
    """Reduce until that fails:
    a rank may have done its part in a call before it goes. Returns type, rank and seconds.
    """
    started = time.monotonic()
    try:
        for _ in range(3):
            comm.all_reduce(numbers(comm.rank, 3000))
    except HostringError as exc:
        return type(exc).__name__, exc.rank, time.monotonic() - started
    return "nothing", None, 0.0
