"""Reductions over the wire of 8-bit blocks: the fold of the rounded, whatever the schedule."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
from oracle import COMBINATIONS, as_library, bits, force, rank_distinct
from oracle import fold_in_order as fold
from rounded import LENGTHS, fold_in_order, rounded

from hostring.arrays.dtypes import BFLOAT16, BY_NAME, MXINT8, PAYLOAD_CODES, nbytes_of
from hostring.bench.cases import REDUCING, case
from hostring.bench.certify_links import certify_on_links
from hostring.bench.contenders import Hostring
from hostring.bench.measure import Effort, Session
from hostring.engine.frames import EXPECTED_BYTES, payload_fields
from hostring.errors import CollectiveMismatch
from hostring.integrations.torch_backend import Options
from hostring.integrations.torch_pg.new_group import connect
from hostring.topologies.proof import NotCertified, certify_all_reduce, combinations

TOPOLOGIES = [("mesh", "rank"), ("ring", "ring"), ("star", "rank"), ("tree", "tree")]


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize(("topology", "variant", "order"), COMBINATIONS)
def test_every_schedule_gives_the_fold_of_the_rounded(run_ranks, topology, variant, order, world_size):
    rows = {n: rank_distinct(world_size, n) for n in LENGTHS}

    def calls(comm):
        force(comm, variant, 1000)  # rounded down to whole blocks
        work = comm.all_reduce(rows[4097][comm.rank].copy(), async_op=True)
        return [comm.all_reduce(rows[n][comm.rank].copy()) for n in LENGTHS], work.wait()

    for results, late in run_ranks(world_size, calls, topology=topology, order=order, wire="mxint8"):
        for n, result in zip((*LENGTHS, 4097), (*results, late), strict=True):
            assert bits(result) == bits(fold_in_order(order, [rounded(row) for row in rows[n]])), f"{n} elements"


@pytest.mark.parametrize("combination", list(combinations()), ids="/".join)
def test_no_contribution_is_cut_inside_of_a_block(combination):
    for world_size in (2, 3, 5):
        for n_elements in (1, 33, 32 * world_size, 300):
            certify_all_reduce(*combination, world_size, n_elements, 64, 32)


def test_a_schedule_that_cuts_inside_of_a_block_is_not_certified():
    with pytest.raises(NotCertified, match="multiples of 32"):
        certify_all_reduce("mesh", "one_shot", "rank", 2, 100, 40, 32)


@pytest.mark.parametrize("transport", ["tcp", "unix", "shm", "tls"])
def test_over_sockets_and_over_shared_memory(run_ranks, monkeypatch, transport):
    monkeypatch.setenv("HOSTRING_SECRET", "between us")
    sizes = (100, 4097, 80_001)
    rows = {n: rank_distinct(3, n) for n in sizes}
    expected = [bits(fold_in_order("rank", [rounded(row) for row in rows[n]])) for n in sizes]

    def calls(comm):
        return [bits(comm.all_reduce(rows[n][comm.rank].copy())) for _ in range(2) for n in sizes]

    assert run_ranks(3, calls, wire="mxint8", transport=transport) == [expected * 2] * 3


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_of_any_stride(run_ranks, world_size):
    rows = rank_distinct(world_size, 5000)
    total = fold_in_order("rank", [rounded(row) for row in rows])

    def calls(comm):
        x = torch.from_numpy(rows[comm.rank])
        strided = torch.stack([x, x], 1)[:, 0]
        matrix = x.reshape(50, 100).clone()
        return comm.all_reduce(x.clone()), comm.all_reduce(strided).clone(), comm.all_reduce(matrix).reshape(-1)

    for results in run_ranks(world_size, calls, wire="mxint8"):
        assert [bits(result) for result in results] == [bits(total)] * 3


@pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_other_reductions_and_operators(run_ranks, topology, order, world_size):
    rows = rank_distinct(world_size, 70 * world_size)
    narrow = [rounded(row) for row in rows]
    total = fold_in_order(order, narrow)
    parts = fold(order, narrow)  # in reduce_scatter, what a rank gets is a chunk, whatever blocks there are

    def calls(comm):
        mine = rows[comm.rank].copy()
        scattered = comm.reduce_scatter(mine)
        at_root = comm.reduce(mine, 1)
        kept = mine.copy()
        average = comm.all_reduce(rows[comm.rank].copy(), "avg")
        largest = comm.all_reduce(rows[comm.rank].copy(), "max")
        gathered = comm.all_gather(rows[comm.rank])
        wide = comm.all_reduce(rows[comm.rank].astype(np.float64))
        return scattered, at_root, kept, average, largest, gathered, wide

    for rank, result in enumerate(run_ranks(world_size, calls, topology=topology, order=order, wire="mxint8")):
        scattered, at_root, kept, average, largest, gathered, wide = result
        assert bits(scattered) == bits(parts[70 * rank : 70 * rank + 70])
        if rank == 1:
            assert bits(at_root) == bits(total)
        else:
            assert bits(kept) == bits(rows[rank]), "x of the others is left as it is"
        assert bits(average) == bits(total / np.float32(world_size))
        assert bits(largest) == bits(np.maximum.reduce(narrow))
        assert bits(gathered) == bits(np.stack(rows)), "what only moves is not rounded"
        assert bits(wide) == bits(fold(order, [row.astype(np.float64) for row in rows]))


@pytest.mark.parametrize("counts", [(64, 32, 0), (32, 64, 5), (96, 5, 0), (31, 33, 32), (0, 0, 70)], ids=str)
def test_parts_of_any_length(run_ranks, counts):
    """Blocks are counted from the array's first element, so that a reduce_scatter has the bits of an all_reduce."""
    rows = rank_distinct(3, sum(counts))
    total, ends = fold("rank", [rounded(row) for row in rows]), np.cumsum([0, *counts])
    whole = all(start % 32 == 0 for start, count in zip(ends, counts, strict=False) if count)

    def calls(comm):
        before = comm.counters.payload_sent
        result = comm.reduce_scatter(rows[comm.rank].copy(), counts=counts)
        return result, comm.counters.payload_sent - before

    for rank, (result, sent) in enumerate(run_ranks(3, calls, wire="mxint8")):
        assert bits(result) == bits(total[ends[rank] : ends[rank + 1]])
        theirs = [n for r, n in enumerate(counts) if r != rank]
        assert sent == sum(nbytes_of(n, MXINT8) if whole else 4 * n for n in theirs)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("n_elements", [100, 4097])
@pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
@pytest.mark.parametrize(
    "kinds", [("float32", "bfloat16"), ("bfloat16", "float16"), ("float32", "bfloat16", "float16")], ids=" ".join
)
def test_ranks_of_16_bits_bring_them_unrounded(run_ranks, topology, order, kinds, n_elements, library):
    rows = [row.astype(BY_NAME[kind]) for row, kind in zip(rank_distinct(len(kinds), n_elements), kinds, strict=True)]
    brought = [rounded(row) if row.dtype == np.float32 else row.astype(np.float32) for row in rows]
    total = fold_in_order(order, brought)

    def calls(comm):
        as_float32 = comm.all_reduce(
            rows[comm.rank].astype(np.float32)
        )  # the same shape, of other dtypes: nothing carries over
        mixed = [comm.all_reduce(as_library(rows[comm.rank], library)) for _ in range(3)]
        return [as_float32, comm.all_reduce(rows[comm.rank].astype(np.float32)), *mixed]

    for kind, results in zip(
        kinds, run_ranks(len(kinds), calls, topology=topology, order=order, wire="mxint8"), strict=True
    ):
        alike = fold_in_order(order, [rounded(row.astype(np.float32)) for row in rows])
        assert [bits(result) for result in results] == [bits(alike)] * 2 + [bits(total.astype(BY_NAME[kind]))] * 3


@pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_counters_hold_what_is_expected(run_ranks, topology, order, world_size):
    wanted = [
        ("all_reduce", 100),
        ("all_reduce", 4096),
        ("reduce", 4097),
        ("reduce_scatter", 32 * world_size),
        ("reduce_scatter", 99),
    ]

    def calls(comm):
        counted = []
        for (name, n_elements), dtype in (
            (called, dtype) for called in wanted for dtype in (np.float32, BFLOAT16, np.float64)
        ):
            n_elements -= n_elements % world_size if name == "reduce_scatter" else 0
            before = comm.counters.payload_sent
            getattr(comm, name)(np.ones(n_elements, dtype))
            counted.append((comm.counters.payload_sent - before, comm.expected_payload(name, n_elements, dtype)))
        return counted

    for counted in run_ranks(world_size, calls, topology=topology, order=order, wire="mxint8"):
        assert [sent for sent, _ in counted] == [expected for _, expected in counted]
    if world_size == 2 and topology == "mesh":
        assert [sent for sent, _ in counted[:6:3]] == [104, 4096 + 128]


@pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_another_number_of_elements_in_as_many_blocks_is_a_mismatch(run_ranks, topology, order, world_size):
    def calls(comm):
        comm.all_reduce(np.ones(101 if comm.rank == 1 else 100, np.float32))
        comm.barrier()

    for result in run_ranks(
        world_size, calls, check=False, topology=topology, order=order, wire="mxint8", timeout=10.0
    ):
        assert isinstance(result, CollectiveMismatch)
        assert "100 elements" in str(result)
        assert "101 elements" in str(result)


@pytest.mark.parametrize("moves", [True, False])
def test_blocks_are_taken_where_float32_is_folded_and_nowhere_else(run_ranks, moves):
    """A header that announces them where data only moves, or where float64 is folded, is a mismatch."""

    def calls(comm):
        x, planner = np.ones(64, np.float32 if moves else np.float64), comm.session.planner
        program = (
            planner.movement("broadcast", 64, x.dtype, 0) if moves else planner.all_reduce(64, x.dtype, "sum", None)
        )
        if comm.rank == 0:
            (message,) = program.stages[0].outgoing[0][2]
            message.header[EXPECTED_BYTES:] = payload_fields(PAYLOAD_CODES[MXINT8], 66)
        if moves:
            comm.broadcast(x)
        else:
            comm.all_reduce(x)
        comm.barrier()

    for result in run_ranks(2, calls, check=False, wire="mxint8", timeout=10.0):
        assert isinstance(result, CollectiveMismatch)
        assert "66 bytes of mxint8; this rank can't take that as 64 of float" in str(result)


def test_a_nan_spoils_its_block_and_no_other(run_ranks):
    x = np.ones(96, np.float32)

    def calls(comm):
        mine = x.copy()
        if comm.rank:
            mine[40] = -np.inf
        with np.errstate(all="raise"):
            return comm.all_reduce(mine)

    for result in run_ranks(2, calls, wire="mxint8"):
        assert (result[32:64].view(np.uint32) == 0x7FC00000).all()
        assert (np.delete(result, slice(32, 64)) == 2).all()


@pytest.mark.parametrize("order", ["rank", "ring", "tree"])
def test_the_benchmark_finds_the_results_right(run_ranks, order):
    def calls(comm):
        session = Session(comm, [Hostring("auto", comm)], Effort(iterations=1, rounds=1, warmup=1))
        wanted = [
            case(name, "sum", np.dtype(dtype), 4004, 3, order)
            for name in REDUCING
            for dtype in (np.float32, BFLOAT16, np.int32)
        ]
        return [row.wrong for one in wanted for row in session.rows(one, lambda what: None)]

    assert run_ranks(3, calls, wire="mxint8", order=order) == [[0] * 9] * 3


def test_a_torch_group_takes_the_wire():
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor(2) as pool:
        options = Options(wire="mxint8", transport="tcp")
        starts = [pool.submit(connect, store, rank, 2, timedelta(seconds=20), options) for rank in range(2)]
        groups = [start.result(30) for start in starts]
        tensors = [torch.full((100,), 1 + 2**-7) for _ in groups]
        for done in [
            pool.submit(lambda g, t: g.allreduce([t]).wait(), *pair) for pair in zip(groups, tensors, strict=True)
        ]:
            done.result(30)
        assert [t.unique().tolist() for t in tensors] == [[2.0]] * 2
        for done in [pool.submit(group.comm.close) for group in groups]:
            done.result(30)


def test_a_split_and_the_environment_keep_the_wire(run_ranks, monkeypatch):
    monkeypatch.setenv("HOSTRING_WIRE", "mxint8")

    def calls(comm):
        with comm.split(0) as part:
            return part.wire, float(part.all_reduce(np.full(3, 1 + 2**-7, np.float32))[0])

    assert run_ranks(2, calls) == [("mxint8", 2.0)] * 2


@pytest.mark.parametrize("combination", list(combinations()), ids="/".join)
def test_certified_on_links(combination):
    assert certify_on_links(*combination, 3, [0, 1, 100, 4097], 64, "memory", "mxint8") == 12


def test_certify_finds_a_group_that_does_not_round(monkeypatch):
    monkeypatch.setattr("hostring.engine.session.Session.travels_as", lambda self, dtype: dtype)
    with pytest.raises(NotCertified, match="other bits"):
        certify_on_links("mesh", "one_shot", "rank", 2, [100], 64, "memory", "mxint8")
