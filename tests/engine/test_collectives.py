"""Every collective in every topology, for all dtypes and odd shapes, against plain numpy."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import numpy as np
import pytest
from oracle import bits, fold_in_order, rank_distinct

from hostring.arrays.dtypes import BY_NAME, NAMES, OPS, check_op, wire_dtype

TOPOLOGIES = [("mesh", "rank"), ("ring", "rank"), ("star", "rank"), ("tree", "tree"), ("ring", "ring")]
WORLD_SIZES = (1, 2, 3, 5)
everywhere = pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
sized = pytest.mark.parametrize("world_size", WORLD_SIZES)

UFUNCS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
LOGICAL = {"sum": np.logical_or, "max": np.logical_or, "prod": np.logical_and, "min": np.logical_and}


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of complex numbers by real operations, each rounded."""
    result = np.empty_like(a)
    result.real, result.imag = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
    return result


def reduced(order: str, rows: list[np.ndarray], op: str) -> np.ndarray:
    """The declared fold of flat arrays, computed in the wire dtype and rounded once."""
    own = rows[0].dtype
    ufunc = {**(LOGICAL if own == np.bool_ else UFUNCS), **BITWISE}[op]
    if own.kind == "c" and op == "prod":
        ufunc = times
    with np.errstate(all="ignore"):
        total = fold_in_order(order, [row.astype(wire_dtype(own)) for row in rows], ufunc)
        if op == "avg":
            parts = total.view(total.real.dtype)
            total = (parts / parts.dtype.type(len(rows))).view(total.dtype)
        return total.astype(own)


def ops_for(dtype: np.dtype) -> list[str]:
    def possible(op: str) -> bool:
        try:
            check_op(op, dtype)
        except TypeError:
            return False
        return True

    return [op for op in OPS if possible(op)]


@everywhere
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_reductions_of_all_dtypes_with_all_operators(run_ranks, topology, order, world_size):
    cases = [(name, op) for name in NAMES for op in ops_for(BY_NAME[name])]
    assert len(cases) > 90
    n_elements, root = 4 * world_size, world_size - 1
    rows = {name: rank_distinct(world_size, n_elements, BY_NAME[name]) for name in NAMES}

    def body(comm):
        mine = {name: rows[name][comm.rank] for name in NAMES}
        return [
            (
                comm.all_reduce(mine[name].copy(), op),
                comm.reduce(mine[name].copy(), root, op),
                comm.reduce_scatter(mine[name].copy(), op),
            )
            for name, op in cases
        ]

    results = run_ranks(world_size, body, topology=topology, order=order)
    for k, (name, op) in enumerate(cases):
        expected = reduced(order, rows[name], op)
        for rank in range(world_size):
            everybody, rooted, part = results[rank][k]
            assert bits(everybody) == bits(expected), (name, op)
            assert bits(rooted) == bits(expected if rank == root else rows[name][rank]), (name, op)
            assert bits(part) == bits(expected[4 * rank : 4 * rank + 4]), (name, op)
            assert everybody.dtype == part.dtype == BY_NAME[name]


@everywhere
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_movement_of_all_dtypes(run_ranks, topology, order, world_size):
    n, root = world_size, world_size // 2
    rows = {name: [r.reshape(n, 3) for r in rank_distinct(n, 3 * n, BY_NAME[name])] for name in NAMES}

    def body(comm):
        results = []
        for name in NAMES:
            mine = rows[name][comm.rank]
            part = comm.scatter(mine if comm.rank == root else None, root, out=np.empty(3, BY_NAME[name]))
            results.append(
                (
                    comm.broadcast(mine.copy(), root),
                    comm.all_gather(mine),
                    comm.gather(mine, root),
                    part,
                    comm.all_to_all(mine),
                )
            )
        return results

    results = run_ranks(n, body, topology=topology, order=order)
    for (k, name), rank in itertools.product(enumerate(NAMES), range(n)):
        sent, everything = rows[name][root], np.stack(rows[name])
        broadcast, all_gathered, gathered, part, exchanged = results[rank][k]
        assert bits(broadcast) == bits(sent), name
        assert all_gathered.shape == (n, n, 3)
        assert bits(all_gathered) == bits(everything), name
        assert (gathered is None) if rank != root else bits(gathered) == bits(everything), name
        assert bits(part) == bits(sent[rank]), name
        assert bits(exchanged) == bits(everything[:, rank]), name
        assert {x.dtype for x in (broadcast, all_gathered, part, exchanged)} == {BY_NAME[name]}


COUNTS = {1: (4,), 2: (5, 2), 3: (3, 0, 4), 5: (1, 0, 6, 2, 0)}


@everywhere
@sized
def test_uneven_counts(run_ranks, topology, order, world_size):
    n, counts, root = world_size, COUNTS[world_size], world_size - 1
    starts = [sum(counts[:r]) for r in range(n + 1)]
    whole = [r.reshape(sum(counts), 2) for r in rank_distinct(n, 2 * sum(counts))]
    matrix = [[(3 * r + q) % 4 for q in range(n)] for r in range(n)]
    exchanged = [rank_distinct(n, 2 * sum(matrix[r]), seed=r)[r].reshape(-1, 2) for r in range(n)]

    def body(comm):
        r = comm.rank
        own = whole[r][starts[r] : starts[r + 1]]
        rows = [matrix[q][r] for q in range(n)]
        return (
            comm.all_gather(own, counts=counts),
            comm.gather(own, root, counts=counts),
            comm.scatter(
                whole[root] if r == root else None, root, counts=counts, out=np.empty((counts[r], 2), np.float32)
            ),
            comm.reduce_scatter(whole[r], counts=counts),
            comm.all_to_all(exchanged[r], send_counts=matrix[r]),
            comm.all_to_all(exchanged[r], send_counts=matrix[r], recv_counts=rows),
        )

    joined = np.concatenate([whole[r][starts[r] : starts[r + 1]] for r in range(n)])
    for r, (everything, gathered, part, share, *swapped) in enumerate(
        run_ranks(n, body, topology=topology, order=order)
    ):
        mine = slice(starts[r], starts[r + 1])
        assert everything.shape == joined.shape
        assert bits(everything) == bits(joined)
        assert (gathered is None) if r != root else bits(gathered) == bits(joined)
        assert bits(part) == bits(whole[root][mine])
        in_turn = [*whole[r + 1 :], *whole[: r + 1]] if order == "ring" else whole
        assert bits(share) == bits(
            fold_in_order("tree" if order == "tree" else "rank", [w[mine].reshape(-1) for w in in_turn])
        )
        assert share.shape == (counts[r], 2)
        pieces = [exchanged[q][sum(matrix[q][:r]) : sum(matrix[q][: r + 1])] for q in range(n)]
        for got in swapped:
            assert got.shape == (sum(matrix[q][r] for q in range(n)), 2)
            assert bits(got) == bits(np.concatenate(pieces))


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
