"""pytest benchmarks/test_all_reduce.py: small all-reduces between this process and one other, over each transport."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hostring
from hostring.launch.cores import pin

KINDS = ("numpy float32", "torch float32", "torch bfloat16")
SIZES = (4, 4 << 10, 64 << 10, 1 << 20)
ENOUGH = 1e6


def array(kind: str, nbytes: int) -> Any:
    library, dtype = kind.split()
    if library == "numpy":
        return np.zeros(nbytes // 4, np.float32)
    import torch

    torch.set_num_threads(1)
    found = getattr(torch, dtype)
    return torch.zeros(max(1, nbytes // found.itemsize), dtype=found)


def other(port: int, transport: str, kind: str, nbytes: int) -> None:
    """Rank 1: joins in until rank 0 brings a large number."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    pin(1)
    with hostring.init(1, 2, transport=transport, timeout=60.0) as comm:
        x = array(kind, nbytes)
        while x[0] < ENOUGH:
            comm.all_reduce(x)


@pytest.fixture
def reduce(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """One all-reduce at rank 0, on a core of its own where there are two."""
    import socket

    transport, kind, nbytes = request.param
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = os.sched_getaffinity(0)
    child = multiprocessing.get_context("spawn").Process(
        target=other, args=(port, transport, kind, nbytes), daemon=True
    )
    child.start()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    pin(0)
    try:
        with hostring.init(0, 2, transport=transport, timeout=60.0) as comm:
            x = array(kind, nbytes)
            yield lambda: comm.all_reduce(x)
            x[0] = 2 * ENOUGH
            comm.all_reduce(x)
    finally:
        os.sched_setaffinity(0, cores)
        child.join(20)
        if child.is_alive():
            child.kill()
            child.join()


CASES = [(transport, kind, nbytes) for transport in ("tcp", "shm") for kind in KINDS for nbytes in SIZES]


@pytest.mark.parametrize("reduce", CASES, ids=[f"{t} {k} {n}" for t, k, n in CASES], indirect=True)
def test_all_reduce(benchmark: Any, reduce: Callable[[], Any]) -> None:
    x = benchmark(reduce)
    assert float(x[0]) == 0.0
