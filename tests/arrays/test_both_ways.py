"""Wires that round results as well: the same bits on all ranks, by any schedule, in a quarter or an eighth of bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from oracle import as_library, bits, fold_in_order, rank_distinct
from test_mxfp4 import rounded as in_fours
from test_mxint8_collectives import fold_in_order as fold_in_blocks
from test_mxint8_collectives import rounded as in_eights

from hostring import Feedback
from hostring.arrays.dtypes import BLOCK, WIRES, nbytes_of
from hostring.bench.cases import REDUCING, case
from hostring.bench.certify_links import certify_on_links
from hostring.bench.contenders import Hostring
from hostring.bench.measure import Effort, Session
from hostring.errors import CollectiveMismatch

TO = {"mxint8-both": in_eights, "mxfp4-both": in_fours}
TOPOLOGIES = [
    ("mesh", "rank"),
    ("mesh", "ring"),
    ("ring", "ring"),
    ("ring", "rank"),
    ("star", "tree"),
    ("tree", "tree"),
]


def force(comm, variant):
    if variant is not None:
        comm.session.tuner.force(variant, 64)


@pytest.mark.parametrize("wire", TO)
@pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_results_are_the_rounded_fold(run_ranks, wire, topology, order, world_size):
    for n_elements in (1, 31, 100, 4097):
        rows = rank_distinct(world_size, n_elements)
        narrow = [TO[wire](row) for row in rows]
        total = TO[wire](fold_in_blocks(order, narrow))
        mean = TO[wire](fold_in_blocks(order, narrow) / np.float32(world_size))

        def calls(comm, rows=rows):
            return comm.all_reduce(rows[comm.rank].copy()), comm.all_reduce(rows[comm.rank].copy(), "avg")

        for got, average in run_ranks(world_size, calls, topology=topology, order=order, wire=wire):
            assert bits(got) == bits(total)
            assert bits(average) == bits(mean)


@pytest.mark.parametrize("wire", TO)
def test_halves_and_wholes_have_the_same_bits_and_halves_send_fewest_bytes(run_ranks, wire):
    n, world_size = 3 * 1024, 3
    rows = rank_distinct(world_size, n)
    found = []
    for variant in ("one_shot", "two_shot"):

        def calls(comm, variant=variant):
            force(comm, variant)
            state, results = Feedback(), []
            for _ in range(3):
                before = comm.counters.payload_sent
                results.append(comm.all_reduce(rows[comm.rank].copy(), "avg", feedback=state))
                sent = comm.counters.payload_sent - before
            assert sent == comm.expected_payload("all_reduce", n)
            assert comm.counters.calls["all_reduce"] == 3
            return [bits(x) for x in results], bits(state.residual), sent

        found.append(run_ranks(world_size, calls, wire=wire))
    (whole, halves) = found
    assert [row[:2] for row in whole] == [row[:2] for row in halves]
    assert len({tuple(results) for results, _, _ in halves}) == 1, "all ranks have the same bits"
    blocks = nbytes_of(n, WIRES[wire])
    assert {sent for *_, sent in halves} == {2 * (world_size - 1) * blocks // world_size}
    assert {sent for *_, sent in whole} == {(world_size - 1) * blocks}
    float32 = 2 * (world_size - 1) * 4 * n / world_size
    assert halves[0][2] / float32 == pytest.approx({"mxint8-both": 0.258, "mxfp4-both": 0.133}[wire], abs=0.001)


@pytest.mark.parametrize("wire", TO)
@pytest.mark.parametrize("variant", ["one_shot", "two_shot"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_feedback_brings_back_what_results_have_lost(run_ranks, wire, variant, op):
    """The residuals of all ranks are what contributions and results have lost together, so sums over time are right."""
    world_size, n = 3, 320
    rows = rank_distinct(world_size, n)
    exact = np.add.reduce(np.asarray(rows, np.float64)) / (world_size if op == "avg" else 1)

    def calls(comm):
        force(comm, variant)
        state, total = Feedback(), np.zeros(n)
        for _ in range(40):
            total += comm.all_reduce(rows[comm.rank].copy(), op, feedback=state)
        return total, state.residual.astype(np.float64)

    results = run_ranks(world_size, calls, wire=wire)
    left = np.add.reduce([residual for _, residual in results]) / (world_size if op == "avg" else 1)
    np.testing.assert_allclose(results[0][0] + left, 40 * exact, rtol=0, atol=1e-3 * np.abs(exact).max())


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("n_elements", [100, 4097])
@pytest.mark.parametrize("variant", ["one_shot", "two_shot"])
def test_ranks_of_unlike_dtypes_get_one_result(run_ranks, library, n_elements, variant):
    kinds = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
    rows = [row.astype(kind) for row, kind in zip(rank_distinct(3, n_elements), kinds, strict=True)]
    brought = [in_eights(row) if row.dtype == np.float32 else row.astype(np.float32) for row in rows]
    total = in_eights(fold_in_order("rank", brought))

    def calls(comm):
        force(comm, variant)
        return [comm.all_reduce(as_library(rows[comm.rank], library)) for _ in range(2)]

    for kind, results in zip(kinds, run_ranks(3, calls, wire="mxint8-both"), strict=True):
        assert [bits(result) for result in results] == [bits(total.astype(kind))] * 2


def test_other_dtypes_and_collectives_are_left_alone(run_ranks):
    rows = rank_distinct(3, 3 * BLOCK)

    def calls(comm):
        mine = rows[comm.rank].copy()
        return comm.reduce_scatter(mine), comm.all_gather(mine), comm.all_reduce(mine.astype(np.float64))

    total = fold_in_order("rank", [in_eights(row) for row in rows])
    for rank, (part, gathered, wide) in enumerate(run_ranks(3, calls, wire="mxint8-both")):
        assert bits(part) == bits(total[rank * BLOCK : (rank + 1) * BLOCK])
        assert bits(gathered) == bits(np.stack(rows))
        assert bits(wide) == bits(fold_in_order("rank", [row.astype(np.float64) for row in rows]))


@pytest.mark.parametrize("variant", ["one_shot", "two_shot"])
def test_another_size_is_a_mismatch_of_the_all_reduce(run_ranks, variant):
    def calls(comm):
        force(comm, variant)
        comm.all_reduce(np.ones(101 if comm.rank == 1 else 100, np.float32))
        comm.barrier()

    for result in run_ranks(3, calls, check=False, wire="mxint8-both", timeout=10.0):
        assert isinstance(result, CollectiveMismatch)
        assert "all_reduce" in str(result)
        assert "reduce_scatter" not in str(result)


def test_the_benchmark_and_certify_know_them(run_ranks):
    def calls(comm):
        session = Session(comm, [Hostring("auto", comm)], Effort(iterations=1, rounds=1, warmup=1))
        wanted = [
            case(name, op, np.dtype(dtype), 4004, 3, "rank")
            for name in REDUCING
            for op in ("sum", "avg")
            for dtype in (np.float32, ml_dtypes.bfloat16)
        ]
        return [row.wrong for one in wanted for row in session.rows(one, lambda what: None)]

    for wire in TO:
        assert run_ranks(3, calls, wire=wire) == [[0] * 12] * 3
        assert certify_on_links("mesh", "two_shot", "rank", 3, [0, 1, 100], 64, "memory", wire) == 9
