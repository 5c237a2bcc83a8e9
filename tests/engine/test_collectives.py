"""Every collective in every topology, for all dtypes and uneven shares, against plain numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from every_topology import everywhere, reduced, sized
from oracle import bits, fold_in_order, rank_distinct

from hostring.arrays.dtypes import BY_NAME, NAMES, OPS, check_op


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
