"""numpy's floating-point settings don't reach into a collective: whatever overflows, nothing warns, nothing raises."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings

import numpy as np
import pytest
from oracle import bits

from hostring.arrays.dtypes import BY_NAME, NAMES, OPS, check_op

FLOATS = [name for name in NAMES if "float" in name or "complex" in name]
SETTINGS = {"divide": "raise", "over": "raise", "under": "raise", "invalid": "raise"}


def possible(name: str) -> list[str]:
    def allowed(op: str) -> bool:
        try:
            check_op(op, BY_NAME[name])
        except TypeError:
            return False
        return True

    return [op for op in OPS if allowed(op)]


def extremes(name: str, rank: int) -> np.ndarray:
    """Huge, tiny, infinite and zero numbers, and all NaNs: in the same places on each rank, then shifted by rank."""
    dtype = BY_NAME[name]
    width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    top = np.arange(1 << min(16, 8 * width), step=1 if width == 1 else 41).astype(f"u{width}")
    patterns = (top << np.uint8(max(0, 8 * width - 16))) | np.uint8(rank)
    patterns = np.resize(patterns, patterns.size // 2 * 2)
    return np.concatenate((patterns, np.roll(patterns, 3 + 10 * rank))).view(dtype)


def every_call(comm, name: str) -> list[bytes]:
    """Each collective once, and what it gave."""
    found = []

    def add(result):
        found.append(np.asarray(result).tobytes())

    for op, asynchronous in itertools.product(possible(name), (False, True)):
        x = extremes(name, comm.rank)
        done = comm.all_reduce(x, op, async_op=asynchronous)
        add(done.wait() if asynchronous else done)
        add(comm.reduce_scatter(np.tile(extremes(name, comm.rank), comm.world_size), op))
        add(comm.reduce(extremes(name, comm.rank), 0, op) if comm.rank == 0 else x[:0])
        if comm.rank:
            comm.reduce(extremes(name, comm.rank), 0, op)
    add(comm.all_gather(extremes(name, comm.rank)))
    add(comm.broadcast(extremes(name, comm.rank), 1))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", FLOATS)
def test_no_setting_of_numpy_reaches_into_a_collective(run_ranks, name, world_size):
    """And the caller's settings are as before. All operators, and all dtypes that can overflow."""

    def body(comm, settings):
        with np.errstate(**settings):
            found = every_call(comm, name)
            assert np.geterr() == settings
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raising = run_ranks(world_size, lambda comm: body(comm, SETTINGS))
        warning = run_ranks(world_size, lambda comm: body(comm, dict.fromkeys(SETTINGS, "warn")))
    ignoring = run_ranks(world_size, lambda comm: body(comm, dict.fromkeys(SETTINGS, "ignore")))
    assert raising == warning == ignoring


@pytest.mark.parametrize("wire", ["bfloat16", "mxint8"])
@pytest.mark.parametrize("names", list(itertools.combinations(["float16", "bfloat16", "float32"], 2)))
def test_nor_into_one_of_several_dtypes_or_with_a_lossy_wire(run_ranks, wire, names):
    def body(comm):
        with np.errstate(**SETTINGS):
            x = np.resize(extremes(names[comm.rank], comm.rank), 256)
            comm.all_reduce(x)
            return bits(comm.all_gather(extremes(names[comm.rank], comm.rank))) and np.geterr() == SETTINGS

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kwargs in ({}, {"wire": wire}):
            run_ranks(2, body, **kwargs)


def test_a_sum_that_overflows_prints_nothing():
    """As a program sees it, with numpy's own settings, on this thread and on the group's."""
    program = """
import threading
import numpy as np
np.seterr(all="raise")
import hostring
from hostring.rendezvous import MemoryStore
np.seterr(all="warn")
store = MemoryStore()
def rank(r):
    with hostring.init(r, 2, store=store, transport="memory") as comm:
        x = np.full(1000, 3e38, np.float32)
        comm.all_reduce(x)
        assert np.isinf(x).all()
        comm.all_reduce(np.full(1000, 3e38, np.float32), async_op=True).wait()
threads = [threading.Thread(target=rank, args=(r,)) for r in (0, 1)]
[t.start() for t in threads], [t.join() for t in threads]
"""
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning" not in done.stderr


@pytest.mark.parametrize("error", ["over", "under", "invalid"])
def test_numpy_would_complain_about_these_values(error):
    """Else the tests above show nothing."""
    with np.errstate(all="ignore", **{error: "raise"}), pytest.raises(FloatingPointError):
        np.multiply(extremes("float32", 0), extremes("float32", 1))
