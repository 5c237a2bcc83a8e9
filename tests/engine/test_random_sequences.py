"""Random programs of collectives, with random delays: every rank gets what numpy says, and the counters agree."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import as_library, bits, fold_in_order, rank_distinct
from ranks import in_threads

from hostring.arrays.dtypes import BY_NAME

KINDS = [
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier",
    "exchange", "decide",
]  # fmt: skip
DTYPES = ["float32", "float16", "bfloat16", "int32", "float64", "uint8", "float8_e5m2"]
TOPOLOGIES = [
    ("mesh", "rank"),
    ("ring", "rank"),
    ("star", "rank"),
    ("tree", "tree"),
    ("mesh", "tree"),
    ("ring", "ring"),
]
SIZES = [0, 1, 3, 17, 600, 9000]

WHEN = st.sampled_from(["wait", "later"])
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(DTYPES), st.sampled_from(SIZES), st.integers(0, 99), WHEN),
    min_size=3,
    max_size=14,
)


def rows(step: tuple, world_size: int) -> list[np.ndarray]:
    kind, dtype, n, seed, _ = step
    n = n * world_size if kind in ("reduce_scatter", "scatter", "all_to_all") else n
    return rank_distinct(world_size, n, BY_NAME[dtype], seed=seed)


def call(comm: Any, step: tuple, mine: np.ndarray) -> Any:
    """Start one step. Returns a work, or its result."""
    kind, _, n, seed, when = step
    later = {"async_op": when == "later"}
    root = seed % comm.world_size
    x = as_library(mine, "torch" if (seed + comm.rank) % 3 == 0 else "numpy")
    if kind in ("reduce_scatter", "scatter", "all_to_all"):
        x = x.reshape(comm.world_size, n)
    if kind == "scatter":
        out = as_library(np.zeros(n, mine.dtype), "numpy")
        return comm.scatter(x if comm.rank == root else None, root, out=out, **later)
    if kind == "barrier":
        return comm.barrier(**later)
    if kind == "decide":
        return comm.decide(mine, lambda stacked: stacked[-1], root)
    if kind == "exchange":
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        out = comm.send(x, right, seed, async_op=True)
        got = comm.recv(as_library(np.zeros_like(mine), "numpy"), left, seed)
        out.wait()
        return got
    rooted = (root,) if kind in ("reduce", "broadcast", "gather") else ()
    return getattr(comm, kind)(x, *rooted, **later)


def expected(step: tuple, given: list[np.ndarray], rank: int, order: str) -> bytes | None:
    kind, dtype, n, seed, _ = step
    world_size = len(given)
    root, own = seed % world_size, BY_NAME[dtype]
    wire = np.dtype(np.float32) if "float" in dtype and own.itemsize < 4 else own
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        if kind == "reduce" and rank != root:
            return bits(given[rank])
        with np.errstate(all="ignore"):
            total = fold_in_order(order, [g.astype(wire) for g in given]).astype(own)
        return bits(total[rank * n : (rank + 1) * n] if kind == "reduce_scatter" else total)
    return {
        "broadcast": lambda: bits(given[root]),
        "all_gather": lambda: b"".join(map(bits, given)),
        "gather": lambda: b"".join(map(bits, given)) if rank == root else None,
        "scatter": lambda: bits(given[root][rank * n : (rank + 1) * n]),
        "all_to_all": lambda: b"".join(bits(g[rank * n : (rank + 1) * n]) for g in given),
        "barrier": lambda: None,
        "exchange": lambda: bits(given[(rank - 1) % world_size]),
        "decide": lambda: bits(given[-1]),
    }[kind]()


@pytest.mark.parametrize("transport", ["memory", "tcp"])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, world_size=st.integers(2, 5), where=st.sampled_from(TOPOLOGIES), delays=st.integers(0, 1 << 30))
def test_random_sequences(transport, steps, world_size, where, delays):
    topology, order = where

    def body(comm):
        wait = random.Random(delays * 7 + comm.rank)
        started = []
        for step in steps:
            if delays % 2:
                time.sleep(wait.random() * 0.002)
            started.append(call(comm, step, rows(step, world_size)[comm.rank]))
        results = [s.wait() if hasattr(s, "is_completed") else s for s in started]
        return [None if r is None else bits(r) for r in results], comm.counters.snapshot()["links"]

    results = in_threads(world_size, body, topology=topology, order=order, transport=transport)
    for k, step in enumerate(steps):
        given = rows(step, world_size)
        for rank in range(world_size):
            assert results[rank][0][k] == expected(step, given, rank, order), (k, step, rank)
    for rank, (_, links) in enumerate(results):
        for peer, link in links.items():
            assert link["payload_sent"] == results[peer][1][rank]["payload_received"]
            assert link["messages_sent"] == results[peer][1][rank]["messages_received"]
