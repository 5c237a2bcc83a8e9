"""Scratch memory is reused, and bounded by the largest buffer, whatever the topology, the dtype and the number of
shapes.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

MEGABYTE = 1 << 20
TOPOLOGIES = [
    ("mesh", "rank"),
    ("mesh", "ring"),
    ("ring", "rank"),
    ("ring", "ring"),
    ("ring", "tree"),
    ("star", "rank"),
    ("tree", "tree"),
]


CALLS = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "reduce": lambda c, x: c.reduce(x, 1),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "broadcast": lambda c, x: c.broadcast(x, 1),
    "all_gather": lambda c, x: c.all_gather(x),
    "gather": lambda c, x: c.gather(x, 1),
    "all_to_all": lambda c, x: c.all_to_all(x),
}


@pytest.mark.parametrize("world_size", [3, 8])
@pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_at_most_twice_the_buffer(run_ranks, topology, order, world_size, dtype):
    """The buffer is what the reduction computes in: float32 for a bfloat16 array."""
    wire = 4
    n_elements = (MEGABYTE // wire + 5000) // world_size * world_size

    def body(comm):
        before, staged = comm.memory_held, n_elements * wire if dtype != np.float32 else 0
        for name, call in CALLS.items():
            call(comm, np.ones(n_elements, dtype))
            assert comm.memory_held - before <= 2 * n_elements * wire + staged, name
        return True

    assert run_ranks(world_size, body, topology=topology, order=order) == [True] * world_size


@pytest.mark.parametrize("kinds", [["float32"] * 3, ["bfloat16"] * 3, ["float32", "bfloat16", "float16"]], ids=" ".join)
@pytest.mark.parametrize("topology", ["mesh", "ring", "star"])
def test_many_shapes_share_the_memory_of_the_largest(run_ranks, topology, kinds):
    """Growing and shrinking: neither programs nor payloads of other dtypes keep memory of their own."""
    sizes = [300_000 + 40_000 * k for k in range(6)]

    def body(comm):
        dtype = np.dtype(getattr(ml_dtypes, kinds[comm.rank], None) or kinds[comm.rank])
        for n in [*sizes, *sizes[::-1], *sizes]:
            comm.all_reduce(np.ones(n, dtype))
            comm.all_gather(np.ones(n // 8, dtype))
        return comm.memory_held

    most = max(run_ranks(3, body, topology=topology))
    staged = 4 * sizes[-1] if kinds != ["float32"] * 3 else 0
    assert most <= 2 * 4 * sizes[-1] + staged


def test_one_huge_call_does_not_hold_its_staging_memory_for_ever(run_ranks):
    def body(comm):
        comm.all_reduce(np.ones(17 * MEGABYTE, np.float16), "max")
        before = comm.memory_held
        comm.all_reduce(np.ones(1000, np.float16), "max")
        return before - comm.memory_held

    for given_back in run_ranks(2, body):
        assert 67 * MEGABYTE < given_back <= 68 * MEGABYTE, "what 17 M float16 are as float32"
