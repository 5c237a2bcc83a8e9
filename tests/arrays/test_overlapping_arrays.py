"""Arrays whose elements share memory are reduced right if they can hold the result, and refused if not."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from oracle import bits, fold_in_order, host, rank_distinct

from hostring.arrays.overlaps import overlap

torch = pytest.importorskip("torch")


def expanded(values: np.ndarray, library: str, how: str) -> Any:
    """3 x 4 elements over the memory of a few."""
    if library == "numpy":
        base = values.copy()
        shapes = {
            "one for all": (base[:1], (0, 0)),
            "a row for all": (base[:4], (0, base.itemsize)),
            "a column for all": (base[:3], (base.itemsize, 0)),
            "windows": (base[:6], (base.itemsize, base.itemsize)),
        }
        memory, strides = shapes[how]
        return np.lib.stride_tricks.as_strided(memory, (3, 4), strides)
    base = torch.from_numpy(values.copy())
    return {
        "one for all": lambda: base[:1].expand(3, 4),
        "a row for all": lambda: base[:4].expand(3, 4),
        "a column for all": lambda: base[:3, None].expand(3, 4),
        "windows": lambda: base[:6].as_strided((3, 4), (1, 1)),
    }[how]()


HOW = ("one for all", "a row for all", "a column for all", "windows")


@pytest.mark.parametrize("order", ["rank", "ring"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_elements_that_share_memory_are_reduced_right(run_ranks, library, how, order):
    dtypes = (np.float32, np.float16)

    def body(comm: Any) -> Any:
        sums = []
        for dtype in dtypes:
            mine = [expanded(rank_distinct(3, 24, dtype)[comm.rank], library, how) for _ in range(4)]
            x = mine[0]
            assert comm.all_reduce(x) is x
            sums.append(host(x).copy())
            assert comm.all_reduce_coalesced([mine[1]])[0] is mine[1]
            plain = host(x).copy() if comm.rank == 0 else np.zeros((3, 4), dtype)
            both = comm.all_reduce_coalesced([mine[2], plain])
            assert bits(both[0]) == bits(x) == bits(mine[1])
            if order == "rank":
                root, received = comm.reduce(mine[3], 1), comm.broadcast(mine[1], 2)
                assert comm.rank != 1 or bits(root) == bits(x)
                assert bits(received) == bits(x)
            gathered = comm.all_gather(expanded(rank_distinct(3, 24, dtype)[comm.rank], library, how))
            sums.append(host(gathered).copy())
        return sums

    results = run_ranks(3, body, order=order)
    for k, dtype in enumerate(dtypes):
        rows = [host(expanded(rank_distinct(3, 24, dtype)[r], library, how)).copy() for r in range(3)]
        wide = [row.astype(np.float32).reshape(-1) for row in rows]
        for result in results:
            assert bits(result[2 * k]) == bits(results[0][2 * k])
            assert bits(result[2 * k + 1]) == bits(np.stack(rows))
            if order == "rank":
                assert bits(result[2 * k]) == bits(fold_in_order(order, wide).astype(dtype))
            else:  # an element's place decides where its fold begins, and one place holds several: any of their folds
                exact = sum(row.astype(np.float64) for row in wide).reshape(3, 4)
                scale = sum(np.abs(row.astype(np.float64)) for row in wide).reshape(3, 4)
                slack = 4 * float(np.finfo(dtype).eps) * scale + 1e-30
                assert (np.abs(result[2 * k].astype(np.float64) - exact) <= slack).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_sum_that_some_rank_can_not_hold_is_refused_on_all(run_ranks, library):
    """Only rank 0's elements share memory: their sums differ, and rank 0 has one place for them."""

    def body(comm: Any) -> Any:
        x = rank_distinct(3, 12)[comm.rank].reshape(3, 4)
        x = expanded(x.reshape(-1), library, "a row for all") if comm.rank == 0 else x
        before = bits(x)

        def call_after_all_have_started() -> None:
            comm.barrier()
            comm.all_reduce(x)

        with pytest.raises(RuntimeError, match="share memory"):
            call_after_all_have_started()
        assert comm.rank != 0 or bits(x) == before
        return True

    assert run_ranks(3, body) == [True] * 3


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_elements_that_share_memory_take_nothing_from_others(run_ranks, library, how):
    """What others send differs from element to element."""

    def body(comm: Any) -> Any:
        x = expanded(np.zeros(24, np.float32), library, how)
        whole = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2, 3, 4), (0, 0, 0))
        mine = np.ones((3, 4), np.float32)
        calls = [
            lambda: comm.recv(x, 1 - comm.rank),
            lambda: comm.all_gather(mine, out=whole),
            lambda: comm.gather(mine, comm.rank, out=whole),
            lambda: comm.reduce_scatter(np.ones((6, 4), np.float32), out=x),
            lambda: comm.scatter(np.ones((2, 3, 4), np.float32), comm.rank, out=x),
            lambda: comm.all_to_all(
                mine[:2], out=np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2, 4), (0, 0))
            ),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="share memory"):
                call()
        return comm.all_reduce(np.ones(2)).tolist()

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


def test_a_read_only_broadcast_view_is_an_immutable_array(run_ranks):
    """Its results are new arrays, so nothing is refused, and the other ranks may bring any layout."""

    def body(comm: Any) -> Any:
        rows = rank_distinct(2, 12)
        views = [np.broadcast_to(rows[0][:4], (3, 4)), rows[1].reshape(3, 4)]
        expected = views[0] + views[1]
        x = views[comm.rank]
        before = bits(x)
        total = comm.all_reduce(x)
        assert bits(total) == bits(expected)
        sent = rank_distinct(2, 12, seed=1)[1]
        got = comm.recv(x, 1) if comm.rank == 0 else comm.send(sent, 0)
        assert comm.rank == 1 or (bits(got), bits(x)) == (bits(sent), before)
        return True

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("collective", ["reduce", "broadcast"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_values_that_one_place_can_not_hold_end_the_group(run_ranks, library, collective):
    """Only the rank that gets them knows of its layout. The others hear of it when they go on."""

    def body(comm: Any) -> Any:
        dense = rank_distinct(3, 12)[comm.rank].reshape(3, 4)
        x = expanded(dense.reshape(-1), library, "a row for all") if comm.rank == 1 else dense

        def call_and_go_on() -> None:
            comm.barrier()  # all ranks have started
            comm.reduce(x, 1) if collective == "reduce" else comm.broadcast(x, 0)
            comm.barrier()

        with pytest.raises((ValueError, RuntimeError), match="share memory"):
            call_and_go_on()
        return True

    assert run_ranks(3, body) == [True] * 3


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, -1, -2])), max_size=3),
    st.sampled_from([1, 2]),
)
def test_elements_share_memory_where_two_places_are_nearer_than_an_element(dims, itemsize):
    shape, strides = [n for n, _ in dims], [stride for _, stride in dims]
    places = sorted(
        sum(k * s for k, s in zip(at, strides, strict=True)) for at in itertools.product(*map(range, shape))
    )
    shared = any(b - a < itemsize for a, b in itertools.pairwise(places))
    assert bool(overlap(shape, strides, itemsize)) == shared
