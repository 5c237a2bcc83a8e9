"""Several arrays in one all-reduce: the bits of an all-reduce each, the messages of one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from oracle import fold_in_order

import hostring
from hostring.errors import CollectiveMismatch

SHAPES = [(3,), (2, 5), (), (0,), (33, 7)]
BF16 = ml_dtypes.bfloat16


def contributions(rank, dtypes):
    rng = np.random.default_rng(100 + rank)
    return [
        np.asarray(rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4)).astype(d)
        for shape, d in zip(SHAPES, dtypes, strict=True)
    ]


@pytest.mark.parametrize("topology", ["mesh", "ring", "star"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("dtypes", [[np.float32] * 5, [BF16] * 5, [np.float16, np.float32, BF16, BF16, np.float32]])
def test_the_bits_are_those_of_a_call_each(run_ranks, world_size, topology, dtypes):
    def calls(comm):
        together, apart = contributions(comm.rank, dtypes), contributions(comm.rank, dtypes)
        results = comm.all_reduce_coalesced(together, "avg")
        assert all(a is b for a, b in zip(results, together, strict=True))
        counted = dict(comm.counters.calls)
        for x in apart:
            comm.all_reduce(x, "avg")
        return together, apart, counted

    rows = [contributions(rank, dtypes) for rank in range(world_size)]
    for together, apart, counted in run_ranks(world_size, calls, topology=topology):
        assert counted == {"all_reduce": 1}
        for k, (x, y) in enumerate(zip(together, apart, strict=True)):
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
            wide = fold_in_order("rank", [row[k].astype(np.float32).ravel() for row in rows]) / np.float32(world_size)
            np.testing.assert_array_equal(x.ravel(), wide.astype(x.dtype))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", [{"topology": "ring", "order": "ring"}, {"wire": "mxint8"}, {"wire": "bfloat16"}])
@pytest.mark.parametrize(
    "dtypes", [[np.float32] * 5, [np.float16, np.float32, BF16, BF16, np.float32], [np.float16, BF16] * 2 + [BF16]]
)
def test_nothing_is_joined_where_that_would_change_bits(run_ranks, world_size, options, dtypes):
    def calls(comm):
        together, apart = contributions(comm.rank, dtypes), contributions(comm.rank, dtypes)
        comm.all_reduce_coalesced(together)
        for x in apart:
            comm.all_reduce(x)
        return [x.tobytes() for x in together] == [x.tobytes() for x in apart]

    assert all(run_ranks(world_size, calls, **options))


def test_small_arrays_are_joined_and_large_ones_are_not(run_ranks):
    sizes = [7, 5000, 4096, 1, 4097]

    def calls(comm):
        xs = [np.full(size, comm.rank + k, np.float32) for k, size in enumerate(sizes)]
        comm.all_reduce_coalesced(xs)
        assert all(
            np.array_equal(x, np.full(size, 3 + 3 * k)) for k, (x, size) in enumerate(zip(xs, sizes, strict=True))
        )
        return dict(comm.counters.calls)

    assert run_ranks(3, calls) == [{"all_reduce": 3}] * 3


def test_no_list_leaves_much_memory_behind(run_ranks):
    def calls(comm):
        for k in range(1, 40):
            comm.all_reduce_coalesced(
                [np.ones(4096, np.float64)] + [np.ones(1000 * k % 4096, np.float64) for _ in range(50)]
            )
        return comm.memory_held

    for held in run_ranks(2, calls):
        assert held <= 3 * (8 << 17), "the joined buffer, and scratch for what the other rank sends"


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_in_the_order_of_a_tree(run_ranks, world_size):
    def calls(comm):
        xs = contributions(comm.rank, [np.float32] * 5)
        comm.all_reduce_coalesced(xs)
        assert comm.counters.calls["all_reduce"] == 1
        return xs

    rows = [contributions(rank, [np.float32] * 5) for rank in range(world_size)]
    for xs in run_ranks(world_size, calls, topology="tree", order="tree"):
        for k, x in enumerate(xs):
            np.testing.assert_array_equal(x.ravel(), fold_in_order("tree", [row[k].ravel() for row in rows]))


@pytest.mark.parametrize("transport", ["tcp", "unix", "shm", "tls"])
def test_over_sockets_and_over_shared_memory(run_ranks, monkeypatch, transport):
    monkeypatch.setenv("HOSTRING_SECRET", "between us")
    dtypes = [np.float16, np.float32, BF16, BF16, np.float32]

    def calls(comm):
        xs = [*contributions(comm.rank, dtypes), np.full(5000, comm.rank + 1, np.float32)]
        for _ in range(2):
            comm.all_reduce_coalesced(xs, "max")
        return xs

    rows = [contributions(rank, dtypes) for rank in range(3)]
    for xs in run_ranks(3, calls, transport=transport):
        assert (xs.pop() == 3).all()
        for k, x in enumerate(xs):
            np.testing.assert_array_equal(
                x, np.max([row[k].astype(np.float32) for row in rows], axis=0).astype(x.dtype)
            )


def test_arrays_of_two_libraries_and_a_view_that_is_not_contiguous(run_ranks):
    def calls(comm):
        grid = np.full((4, 6), comm.rank + 1, np.float32)
        tensor = torch.full((3,), 10.0 * (comm.rank + 1), dtype=torch.bfloat16)
        work = comm.all_reduce_coalesced((x for x in (grid[:, ::2], tensor)), async_op=True)
        first, second = work.wait()
        assert second is tensor
        assert np.shares_memory(first, grid)
        return grid.tolist(), tensor.tolist()

    expected = [[6.0, comm + 1.0] * 3 for comm in range(3)]
    for rank, (grid, tensor) in enumerate(run_ranks(3, calls)):
        assert grid == [expected[rank]] * 4
        assert tensor == [60.0] * 3


def test_the_same_memory_serves_again_and_lists_may_change(run_ranks):
    def calls(comm):
        found = []
        for k in range(40):
            xs = [np.full(1 + (k + j) % 20, comm.rank + j, np.float32) for j in range(3)]
            comm.all_reduce_coalesced(xs)
            found.append([x.tolist() for x in xs])
        return found

    expected = [[[1.0 + 2 * j] * (1 + (k + j) % 20) for j in range(3)] for k in range(40)]
    assert run_ranks(2, calls) == [expected] * 2


def test_what_can_not_be_folded_together_is_refused_and_the_group_goes_on(run_ranks):
    def calls(comm):
        with pytest.raises(
            TypeError, match="arrays of float32, int32 are not folded in one dtype; make a call for each"
        ):
            comm.all_reduce_coalesced([np.ones(2, np.float32), np.ones(2, np.int32)])
        with pytest.raises(TypeError, match="works on bits"):
            comm.all_reduce_coalesced([np.ones(2, np.float32)] * 2, "band")
        assert comm.all_reduce_coalesced([]) == []
        (alone,) = comm.all_reduce_coalesced([np.full(2, comm.rank, np.int32)])
        integers = comm.all_reduce_coalesced([np.full(2, comm.rank + k, np.int64) for k in range(2)])
        return alone.tolist(), [x.tolist() for x in integers], dict(comm.counters.calls)

    assert run_ranks(2, calls) == [([1, 1], [[1, 1], [3, 3]], {"all_reduce": 2})] * 2


@pytest.mark.parametrize("lists", [([2, 2], [2, 2, 2]), ([3, 5], [5, 3]), ([3, 5000], [5000, 3]), ([4, 4], [8])])
@pytest.mark.parametrize("options", [{}, {"wire": "mxint8"}])
def test_lists_of_other_lengths_are_a_mismatch_on_all_ranks(run_ranks, lists, options):
    def calls(comm):
        with pytest.raises(CollectiveMismatch, match=r"they differ in: .*sizes of the arrays"):
            comm.all_reduce_coalesced([np.ones(size, np.float32) for size in lists[comm.rank]])
        return True

    assert run_ranks(2, calls, timeout=5.0, **options) == [True] * 2


def test_a_world_of_one_gives_its_arrays_back():
    with hostring.init(0, 1) as comm:
        xs = [np.arange(3.0), np.arange(2.0)]
        assert [x.tolist() for x in comm.all_reduce_coalesced(xs)] == [[0.0, 1.0, 2.0], [0.0, 1.0]]
        assert comm.counters.calls["all_reduce"] == 1
