"""Ranks of different float dtypes exchange data:
the sender's exact value arrives, rounded once, whoever forwards it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import as_library, bits, rank_distinct

from hostring import CollectiveMismatch
from hostring.arrays.dtypes import BY_NAME

TOPOLOGIES = [("mesh", "rank"), ("ring", "rank"), ("star", "rank"), ("tree", "tree")]
everywhere = pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
# Coarse dtypes sit between fine ones, so that what is forwarded through them would lose bits if they rounded it on its
# way.
FLOATS = ("float64", "float8_e5m2", "float32", "bfloat16", "float64", "float16")
LIBRARIES = ("numpy", "numpy", "torch", "torch", "torch", "numpy")


def own(rank: int) -> np.dtype:
    return BY_NAME[FLOATS[rank % 6]]


def array(rank: int, x: np.ndarray):
    return as_library(np.asarray(x), LIBRARIES[rank % 6])


def rounded(x: np.ndarray, rank: int) -> bytes:
    with np.errstate(all="ignore"):
        return bits(x.astype(own(rank)))


def rows_of(world_size: int, n_elements: int) -> list[np.ndarray]:
    return [rank_distinct(world_size, n_elements, own(r), seed=n_elements)[r] for r in range(world_size)]


@everywhere
@pytest.mark.parametrize("n_elements", [0, 1, 7, 40_000])
def test_broadcast_from_every_root(run_ranks, topology, order, n_elements):
    rows = rows_of(6, n_elements)

    def body(comm):
        return [comm.broadcast(array(comm.rank, rows[comm.rank]), root) for root in (*range(6), 0)]

    for rank, results in enumerate(run_ranks(6, body, topology=topology, order=order)):
        for root, result in zip((*range(6), 0), results, strict=True):
            assert bits(result) == rounded(rows[root], rank), f"from {FLOATS[root]} to {FLOATS[rank]}"


@everywhere
@pytest.mark.parametrize("n_elements", [0, 1, 7, 20_000])
def test_all_gather_and_gather(run_ranks, topology, order, n_elements):
    rows = rows_of(6, n_elements)

    def body(comm):
        x = array(comm.rank, rows[comm.rank])
        return [comm.all_gather(x) for _ in range(2)], [comm.gather(x, root) for root in range(6)]

    for rank, (everything, gathered) in enumerate(run_ranks(6, body, topology=topology, order=order)):
        expected = b"".join(rounded(row, rank) for row in rows)
        assert [bits(x) for x in everything] == [expected] * 2
        assert [None if x is None else bits(x) for x in gathered] == [
            expected if root == rank else None for root in range(6)
        ]


@everywhere
def test_uneven_gather_of_mixed_dtypes(run_ranks, topology, order):
    counts = [3, 0, 5000, 1, 2, 7]
    rows = [rank_distinct(6, counts[r], own(r))[r] for r in range(6)]

    def body(comm):
        return [comm.all_gather(array(comm.rank, rows[comm.rank]), counts=counts) for _ in range(2)]

    for rank, results in enumerate(run_ranks(6, body, topology=topology, order=order)):
        assert [bits(x) for x in results] == [b"".join(rounded(row, rank) for row in rows)] * 2


@everywhere
def test_scatter_and_all_to_all(run_ranks, topology, order):
    rows = [row.reshape(6, -1) for row in rows_of(6, 6 * 1000)]

    def body(comm):
        x, results = array(comm.rank, rows[comm.rank]), []
        for root in (2, 5, 2):
            out = array(comm.rank, np.zeros(1000, own(comm.rank)))
            results.append(comm.scatter(x if comm.rank == root else None, root, out=out))
        return [*results, comm.all_to_all(x), comm.all_to_all(x)]

    for rank, (*parts, exchanged, again) in enumerate(run_ranks(6, body, topology=topology, order=order)):
        for root, part in zip((2, 5, 2), parts, strict=True):
            assert bits(part) == rounded(rows[root][rank], rank)
        assert bits(exchanged) == bits(again) == b"".join(rounded(row[rank], rank) for row in rows)


def test_send_and_receive(run_ranks):
    rows = rows_of(6, 1000)

    def body(comm):
        works = [
            comm.send(array(comm.rank, rows[comm.rank]), peer, async_op=True) for peer in range(6) if peer != comm.rank
        ]
        got = {p: comm.recv(array(comm.rank, np.zeros(1000, own(comm.rank))), p) for p in range(6) if p != comm.rank}
        for work in works:
            work.wait()
        return got

    for rank, got in enumerate(run_ranks(6, body)):
        assert {p: bits(x) for p, x in got.items()} == {p: rounded(rows[p], rank) for p in range(6) if p != rank}


def test_a_rank_that_changes_its_dtype_from_call_to_call(run_ranks):
    """The expectation of a peer's dtype is only a guess that follows what comes."""
    sequence = ["float32", "float16", "float16", "float64", "float32", "float8_e4m3fn", "float32"]

    def body(comm):
        results = []
        for k, name in enumerate(sequence):
            x = rank_distinct(3, 300, BY_NAME[name if comm.rank == 1 else "float32"], seed=k)[comm.rank]
            results.append(bits(comm.all_gather(x)))
            if name != "float64":
                results.append(bits(comm.all_reduce(x)))
        return results

    for topology in ("mesh", "ring", "star"):
        expected = []
        for k, name in enumerate(sequence):
            rows = [
                rank_distinct(3, 300, BY_NAME[name if r == 1 else "float32"], seed=k)[r].astype("f4") for r in range(3)
            ]
            expected.append(b"".join(bits(row) for row in rows))
            if name != "float64":
                expected.append(bits(rows[0] + rows[1] + rows[2]))
        assert run_ranks(3, body, topology=topology)[0] == expected, topology


def test_complex_numbers_of_two_widths(run_ranks):
    rows = rank_distinct(3, 50, np.complex128)

    def body(comm):
        x = rows[comm.rank].astype(np.complex64 if comm.rank == 1 else np.complex128)
        return comm.broadcast(x.copy(), 2), comm.all_gather(x)

    for rank, (sent, everything) in enumerate(run_ranks(3, body, topology="ring")):
        dtype = np.complex64 if rank == 1 else np.complex128
        narrow = [row.astype(np.complex64 if r == 1 else np.complex128).astype(dtype) for r, row in enumerate(rows)]
        assert bits(sent) == bits(rows[2].astype(dtype))
        assert bits(everything) == bits(np.stack(narrow))


KINDS = {"float32": "a float dtype", "complex64": "a complex dtype"}


@everywhere
@pytest.mark.parametrize(
    ("one", "other"),
    [("int32", "int64"), ("int8", "uint8"), ("float32", "int32"), ("float32", "complex64"), ("bool", "uint8")],
)
def test_other_dtypes_must_agree(run_ranks, topology, order, one, other):
    for call in (lambda c, x: c.broadcast(x), lambda c, x: c.all_gather(x), lambda c, x: c.all_reduce(x)):

        def body(comm, call=call):
            call(comm, np.ones(5, BY_NAME[one if comm.rank else other]))
            comm.barrier()  # the root of a broadcast has only sent: it hears of the mismatch in its next call

        results = run_ranks(3, body, topology=topology, order=order, check=False)
        assert [type(result) for result in results] == [CollectiveMismatch] * 3
        for name in (one, other):
            assert name in str(results[0]) or KINDS.get(name, name) in str(results[0])


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_wide_dtypes_reduce_only_among_themselves(run_ranks, dtype):
    """A float64 sum is not a float32 sum: which of the two it is must not depend on a rank."""
    results = run_ranks(
        3, lambda comm: comm.all_reduce(np.ones(5, BY_NAME[dtype if comm.rank == 2 else "float32"])), check=False
    )
    assert all(isinstance(r, CollectiveMismatch) for r in results)
    assert dtype in str(results[0])
    assert "float32" in str(results[0])


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_elements", [8, 5000, 300_001])
@pytest.mark.parametrize(
    "kinds",
    [
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float16"),
        ("float32", "bfloat16"),
        ("float16",) * 3,
        ("bfloat16", "float16", "float32"),
    ],
)
def test_a_call_in_inference_mode_leaves_nothing_behind(run_ranks, kinds, n_elements, wire):
    """Evaluate, then train: what was kept from the first call is written again in the second."""

    def calls(comm):
        def reduced():
            x = torch.full((n_elements,), comm.rank + 1.0, dtype=getattr(torch, kinds[comm.rank]))
            comm.all_reduce(x)
            return sorted(set(x.tolist()))

        with torch.inference_mode():
            first = reduced()
        between = reduced(), reduced()
        with torch.inference_mode():
            return [first, *between, reduced()]

    total = float(sum(range(1, len(kinds) + 1)))
    assert run_ranks(len(kinds), calls, wire=wire) == [[[total]] * 4] * len(kinds)
