"""Collectives with arrays of odd shapes and layouts, with none, and with one rank; whose memory is touched and kept."""

from __future__ import annotations

import functools
import gc
import weakref

import numpy as np
import pytest
from every_topology import everywhere, reduced, sized
from oracle import bits, rank_distinct

EMPTY = [(0,), (0, 3), (2, 0), (1, 0, 2)]


@everywhere
@sized
def test_nothing_moves_as_well(run_ranks, topology, order, world_size):
    """Zero elements, in any shape: an empty result of the right shape that takes its place among the calls."""
    n = world_size

    def body(comm):
        before = comm.counters.calls["all_gather"]
        shapes = [comm.all_gather(np.empty(shape, np.float32)).shape for shape in EMPTY]
        assert comm.counters.calls["all_gather"] == before + len(EMPTY)
        for shape in EMPTY:
            x = np.empty(shape, np.float16)
            assert comm.all_reduce(x) is x
            assert comm.broadcast(x, n - 1) is x
            assert comm.reduce(x) is x
        assert comm.reduce_scatter(np.empty((0, 3))).shape == (0, 3)
        assert comm.reduce_scatter(np.empty((2 * n, 0))).shape == (2, 0)
        assert comm.all_to_all(np.empty((2 * n, 0))).shape == (2 * n, 0)
        assert comm.all_to_all(np.empty((n + 1, 0)), send_counts=[2] + [1] * (n - 1)).shape == (
            (2 if comm.rank == 0 else 1) * n,
            0,
        )
        assert comm.all_gather(np.empty((0, 4)), counts=[0] * n).shape == (0, 4)
        gathered = comm.gather(np.empty((2, 0)))
        assert (gathered is None) == (comm.rank != 0)
        comm.barrier()
        return shapes, comm.all_reduce(np.array([comm.rank + 1.0]))[0]

    assert run_ranks(n, body, topology=topology, order=order) == [([(n, *s) for s in EMPTY], n * (n + 1) / 2)] * n


def strange_layouts(x: np.ndarray) -> list[np.ndarray]:
    """Arrays with the values of `x`, shape (4, 6), that are not plain C-ordered memory."""
    wide = np.zeros((8, 12), x.dtype)
    wide[::2, 1::2] = x
    backwards = x[::-1, ::-1].copy()[::-1, ::-1]
    return [wide[::2, 1::2], np.asfortranarray(x), backwards, x.astype(x.dtype.newbyteorder(">")), x.T.copy().T]


@everywhere
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int16, np.complex64])
def test_strides_orders_and_byte_orders(run_ranks, topology, order, dtype):
    rows = [r.reshape(4, 6) for r in rank_distinct(3, 24, dtype)]
    expected = reduced(order, [r.reshape(-1) for r in rows], "sum").reshape(4, 6)

    def body(comm):
        results = []
        for x, y, z in zip(*(strange_layouts(rows[comm.rank]) for _ in range(3)), strict=True):
            outside = np.zeros((3, 8, 12), x.dtype)[:, ::2, ::2]
            assert comm.all_reduce(x) is x, "in place"
            assert comm.broadcast(y, 1) is y
            assert comm.all_gather(z, out=outside) is outside
            results.append((x, y, outside, comm.all_to_all(z[:3])))
        return results

    for rank, results in enumerate(run_ranks(3, body, topology=topology, order=order)):
        for total, sent, everything, exchanged in results:
            np.testing.assert_array_equal(total, expected)
            np.testing.assert_array_equal(sent, rows[1])
            np.testing.assert_array_equal(everything, np.stack(rows))
            np.testing.assert_array_equal(exchanged, np.stack([row[rank] for row in rows]))


def test_memory_between_the_elements_is_left_alone(run_ranks):
    def body(comm):
        wide = np.full((4, 6), -7.0)
        wide[:, ::2] = comm.rank + 1
        comm.all_reduce(wide[:, ::2])
        return wide

    for wide in run_ranks(2, body):
        assert (wide[:, ::2] == 3).all()
        assert (wide[:, 1::2] == -7).all()


@everywhere
@sized
def test_scalars_and_zero_dimensions(run_ranks, topology, order, world_size):
    n = world_size

    def body(comm):
        x = np.array(comm.rank + 1.0)
        assert comm.all_reduce(x) is x
        scalar = comm.all_reduce(np.float32(comm.rank + 1))
        gathered = comm.all_gather(np.array(comm.rank, np.int16))
        sent = comm.broadcast(np.array(comm.rank), n - 1)
        part = comm.scatter(np.arange(n) if comm.rank == 0 else None, 0, out=np.empty((), np.int64))
        return float(x), float(scalar), gathered.tolist(), int(sent), int(part), x.shape, gathered.shape

    total = n * (n + 1) / 2
    for rank, result in enumerate(run_ranks(n, body, topology=topology, order=order)):
        assert result == (total, total, list(range(n)), n - 1, rank, (), (n,))


@everywhere
def test_a_read_only_array_is_left_alone_and_a_new_one_returned(run_ranks, topology, order):
    rows = rank_distinct(3, 50, np.float16)

    def body(comm):
        x = rows[comm.rank].copy()
        x.flags.writeable = False
        total, sent = comm.all_reduce(x), comm.broadcast(x, 1)
        np.testing.assert_array_equal(x, rows[comm.rank])
        assert total is not x
        assert comm.rank == 1 or sent is not x
        return total, sent, comm.all_gather(x), comm.reduce(x, 2)

    for rank, (total, sent, everything, rooted) in enumerate(run_ranks(3, body, topology=topology, order=order)):
        expected = reduced(order, rows, "sum")
        assert bits(total) == bits(expected)
        assert bits(sent) == bits(rows[1])
        assert bits(everything) == bits(np.stack(rows))
        assert bits(rooted) == bits(expected if rank == 2 else rows[rank])


@sized
def test_a_world_of_one_and_others_count_their_calls(run_ranks, world_size):
    def body(comm):
        x = np.ones((world_size, 2), np.float32)
        comm.all_reduce(x)
        comm.reduce(x)
        comm.broadcast(x)
        comm.all_gather(x)
        comm.reduce_scatter(x)
        comm.gather(x)
        comm.scatter(x, out=np.empty(2, np.float32))
        comm.all_to_all(x)
        comm.barrier()
        comm.decide(x, lambda stacked: stacked[0])
        return dict(comm.counters.calls)

    names = [
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "gather",
        "scatter",
        "all_to_all",
        "barrier",
        "decide",
    ]
    assert run_ranks(world_size, body) == [dict.fromkeys(names, 1)] * world_size


def test_a_world_of_one_is_the_identity(run_ranks):
    x = rank_distinct(1, 12, np.float16)[0].reshape(3, 4)

    def body(comm):
        for op in ("sum", "avg", "min", "max", "prod"):
            y = x.copy()
            assert comm.all_reduce(y, op) is y
            assert bits(y) == bits(x)
        assert comm.broadcast(x) is x
        assert (
            bits(comm.reduce(x))
            == bits(comm.reduce_scatter(x))
            == bits(comm.all_to_all(x))
            == bits(comm.scatter(x[None]))
            == bits(x)
        )
        assert comm.all_gather(x).shape == comm.gather(x).shape == (1, 3, 4)
        assert bits(comm.all_gather(x, counts=[3])) == bits(x)
        assert comm.expected_payload("all_reduce", 10) == 0
        return functools.reduce(int.__add__, (link.payload_sent for link in comm.counters.links.values()), 0)

    assert run_ranks(1, body) == [0]


def test_no_array_is_held_after_its_call(run_ranks):
    """Programs are kept for the next call of their shape; what the caller brought and got is not kept with them."""

    def calls(comm):
        n = comm.world_size
        made = {
            "all_reduce": lambda x: comm.all_reduce(x),
            "all_reduce of float16": lambda x: comm.all_reduce(x.astype(np.float16)),
            "all_gather": lambda x: comm.all_gather(x),
            "reduce_scatter": lambda x: comm.reduce_scatter(x),
            "broadcast": lambda x: comm.broadcast(x),
            "gather": lambda x: comm.gather(x, 1),
            "scatter": lambda x: comm.scatter(
                x.reshape(n, -1) if comm.rank == 0 else None, out=np.empty(x.size // n, np.float32)
            ),
            "all_to_all": lambda x: comm.all_to_all(x),
            "reduce": lambda x: comm.reduce(x, 0),
        }
        held = []
        for name, call in made.items():
            x = np.ones(300_000 * n, np.float32)
            result = call(x)
            arrays = [weakref.ref(a) for a in (x, result) if a is not None]
            del x, result
            held += [name for a in arrays if a() is not None]
        return held

    gc.disable()
    try:
        assert run_ranks(3, calls) == [[]] * 3
    finally:
        gc.enable()
