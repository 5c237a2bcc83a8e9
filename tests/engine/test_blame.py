"""When ranks call different things, or wait for one, all of them name the same rank, and it is the right one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hostring import CollectiveMismatch, OperationTimeout
from hostring.engine.control import Control
from hostring.engine.counters import blamed
from hostring.engine.frames import Call
from hostring.engine.waits import State, Waiting, odd_one_out
from hostring.integrations.llm.stats import waits_most_for
from hostring.transports import memory


def ones(n_elements: int, dtype: type = np.float32) -> np.ndarray:
    return np.ones(n_elements, dtype)


MISMATCHES = {
    "collective": (lambda c: c.all_reduce(ones(8)), lambda c: c.all_gather(ones(8)), "collective"),
    "operator": (lambda c: c.all_reduce(ones(8)), lambda c: c.all_reduce(ones(8), "max"), "operator"),
    "fewer elements": (lambda c: c.all_reduce(ones(800)), lambda c: c.all_reduce(ones(400)), "number of elements"),
    "other schedule": (lambda c: c.all_reduce(ones(8)), lambda c: c.all_reduce(ones(900_000)), "number of elements"),
    "dtype": (lambda c: c.all_reduce(ones(8)), lambda c: c.all_reduce(ones(8, np.float64)), "dtype"),
    "share": (lambda c: c.all_gather(ones(8)), lambda c: c.all_gather(ones(9)), "number of elements"),
    "parts": (
        lambda c: c.reduce_scatter(ones(8 * c.world_size)),
        lambda c: c.reduce_scatter(ones(16 * c.world_size)),
        "number of elements, counts",
    ),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_reduce(ones(8)), "collective"),
    "all to all": (lambda c: c.all_to_all(ones(2 * c.world_size)), lambda c: c.barrier(), "collective"),
}


@pytest.mark.parametrize("world_size", [3, 5])
@pytest.mark.parametrize("name", MISMATCHES)
def test_the_odd_one_out_is_named_by_all(run_ranks, name, world_size):
    usual, other, differ = MISMATCHES[name]
    for odd in range(world_size):

        def body(comm, odd=odd):
            comm.all_reduce(ones(4))
            (other if comm.rank == odd else usual)(comm)
            comm.barrier()

        results = run_ranks(world_size, body, check=False)
        assert [type(r) for r in results] == [CollectiveMismatch] * world_size, results
        assert [r.rank for r in results] == [odd] * world_size, [str(r) for r in results]
        for r in results:
            assert f"rank {odd} calls " in str(r)
            assert f"they differ in: {differ}" in str(r), str(r)


@pytest.mark.parametrize("world_size", [3, 5])
@pytest.mark.parametrize(("topology", "order"), [("ring", "rank"), ("star", "rank"), ("tree", "tree")])
def test_so_it_is_where_ranks_reach_only_their_neighbours(run_ranks, topology, order, world_size):
    for odd in range(world_size):

        def body(comm, odd=odd):
            comm.barrier()
            comm.all_reduce(ones(9 if comm.rank == odd else 8))
            comm.barrier()

        results = run_ranks(world_size, body, topology=topology, order=order, check=False)
        assert [r.rank for r in results] == [odd] * world_size, [str(r) for r in results]


def test_two_sleeping_ranks_in_different_calls_get_the_difference(run_ranks):
    """Each is the root of its own reduction and sends nothing."""
    results = run_ranks(2, lambda comm: comm.reduce(ones(8), comm.rank), timeout=50.0, check=False)
    for r in results:
        assert isinstance(r, CollectiveMismatch)
        assert "each waits for the other; they differ in: root" in str(r)


def header(n_elements: int) -> bytes:
    return Waiting(0, "all_reduce", Call("all_reduce", "sum", 11, "rank", n_elements), 3).header()


def test_the_vote():
    a, b, c = header(1), header(2), header(3)

    def odd(calls: dict[int, bytes], world_size: int) -> int | None:
        error = odd_one_out(calls, world_size)
        return None if error is None else error.rank

    assert odd({0: a, 1: a, 2: b}, 3) == 2
    assert odd({0: b, 1: a, 2: a}, 3) == 0
    assert odd({0: a, 1: a, 2: a}, 3) is None, "nobody differs"
    assert odd({0: a, 1: b}, 3) is None, "the third decides"
    assert odd({0: a, 1: b, 2: c}, 3) is None, "three different calls have no odd one"
    assert odd({0: a, 1: a, 2: b, 3: b}, 4) is None
    assert odd({0: a, 1: a, 4: b}, 5) is None, "two that are unknown may call as rank 4 does"
    assert odd({0: a, 1: a, 2: a, 4: b}, 5) == 4
    assert odd({0: c, 1: a, 2: a, 3: a, 4: b}, 5) == 0, "the lowest of several"
    assert "rank 2 calls all_reduce #3 of 2 elements" in str(odd_one_out({0: a, 1: a, 2: b}, 3))
    assert "ranks 0, 1 call all_reduce #3 of 1 elements" in str(odd_one_out({0: a, 1: a, 2: b}, 3))


def test_a_state_frame_that_holds_no_header_is_refused():
    good = Waiting(1, "all_reduce", Call("all_reduce", "sum", 11, "rank", 8), 3).to_body()
    assert State.of(good).header == good["header"]
    for body in ({**good, "header": b"x"}, {**good, "header": bytes(64)}, {**good, "waits_for": "1"}, {"seq": 0}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            State.of({**body, "waits_for": [1]} if body.get("waits_for") == "1" else body)


@pytest.mark.parametrize("late", range(3))
def test_all_wait_for_one_and_all_name_it(run_ranks, late):
    """A rank that comes too late is named by those that wait for it, and by those that wait for them."""
    over = threading.Event()

    def body(comm):
        if comm.rank == late:
            assert over.wait(30)
            return None
        try:
            comm.all_reduce(ones(900_000))
        finally:
            over.set()

    results = run_ranks(3, body, topology="ring", timeout=1.0, check=False)
    for rank, r in enumerate(results):
        if rank != late:
            assert isinstance(r, OperationTimeout), r
            assert r.rank == late, str(r)


def test_of_two_ranks_that_wait_for_each_other_one_is_named():
    """Each waits a little for the other in every call; only the difference tells who is slow."""
    assert blamed(np.array([[0.0, 0.0145], [0.0143, 0.0]])).round(6).tolist() == [0.0, 0.0002]
    assert blamed(np.zeros((3, 3))).tolist() == [0.0, 0.0, 0.0]
    slow = np.array([[0.0, 0.1, 2.0], [0.1, 0.0, 3.0], [0.5, 0.5, 0.0]])
    assert blamed(slow).tolist() == [0.0, 0.0, 4.0]
    waits = {0: {1: 0.0145}, 1: {0: 0.0143}}
    assert waits_most_for(1, waits) == (None, 0.0)
    assert waits_most_for(0, waits) == (1, pytest.approx(0.0002))
    assert waits_most_for(2, waits) == (None, 0.0)


def test_a_rank_asked_twice_answers_its_present_call():
    """What a rank said of an earlier call is no evidence in a later one."""
    ends = memory.pair(0, 1)
    mine, theirs = Control(0, {1: ends[0]}), Control(1, {0: ends[1]})
    theirs.waiting = Waiting(0, "barrier", Call("barrier", None, 0, "rank", 0), 1)
    mine.ask(1)
    theirs.hear([])
    mine.hear([])
    mine.waiting = Waiting(1, "all_reduce", Call("all_reduce", "sum", 11, "rank", 8), 2)
    mine.hear([])
    mine.waiting = Waiting(1, "all_reduce", Call("all_reduce", "sum", 11, "rank", 8), 1)
    with pytest.raises(CollectiveMismatch, match="they differ in: collective"):
        mine.hear([])
    for end in ends:
        end.close()
