"""Ranks that call different things all raise CollectiveMismatch, which names the call's number and both sides."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hostring
from hostring import CollectiveMismatch, HostringError
from hostring.arrays.dtypes import CODES
from hostring.engine.frames import Call, decode
from hostring.rendezvous import MemoryStore

F32 = np.float32
TOPOLOGIES = [("mesh", "rank"), ("ring", "rank"), ("star", "rank"), ("tree", "tree")]
everywhere = pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)


def ones(n_elements: int, dtype: type = F32) -> np.ndarray:
    return np.ones(n_elements, dtype)


# What most ranks call, what one rank calls instead, and the words that tell the two apart.
MISMATCHES = {
    "another collective": (
        lambda c: c.all_reduce(ones(8)), lambda c: c.all_gather(ones(8)), ("all_reduce #3", "all_gather #3"),
    ),
    "a barrier": (lambda c: c.all_reduce(ones(8)), lambda c: c.barrier(), ("all_reduce #3", "barrier #3")),
    "a barrier instead of nothing": (
        lambda c: c.all_reduce(ones(0)), lambda c: c.barrier(), ("all_reduce #3", "barrier #3"),
    ),
    "another operator": (lambda c: c.all_reduce(ones(8)), lambda c: c.all_reduce(ones(8), "max"), ("op sum", "op max")),
    "avg and sum": (lambda c: c.all_reduce(ones(8)), lambda c: c.all_reduce(ones(8), "avg"), ("op sum", "op avg")),
    "fewer elements": (
        lambda c: c.all_reduce(ones(800)), lambda c: c.all_reduce(ones(400)), ("800 elements", "400 elements"),
    ),
    "more elements": (
        lambda c: c.all_reduce(ones(400)), lambda c: c.all_reduce(ones(800)), ("400 elements", "800 elements"),
    ),
    "another schedule by size": (
        lambda c: c.all_reduce(ones(10)), lambda c: c.all_reduce(ones(900_000)), ("10 elements", "900000 elements"),
    ),
    "one less, when chunks are uneven": (
        lambda c: c.all_reduce(ones(70_000)), lambda c: c.all_reduce(ones(69_999)), ("70000", "69999"),
    ),
    "another dtype": (
        lambda c: c.all_reduce(ones(8)), lambda c: c.all_reduce(ones(8, np.float64)), ("float32", "float64"),
    ),
    "another integer": (
        lambda c: c.all_reduce(ones(8, np.int8)), lambda c: c.all_reduce(ones(8, np.int16)), ("int8", "int16"),
    ),
    "another root": (lambda c: c.reduce(ones(8), 0), lambda c: c.reduce(ones(8), 1), ("reduce #3",)),
    "another root of broadcast": (
        lambda c: c.broadcast(ones(8), 0), lambda c: c.broadcast(ones(8), 1), ("broadcast #3",),
    ),
    "another size of broadcast": (
        lambda c: c.broadcast(ones(8)), lambda c: c.broadcast(ones(9)), ("8 elements", "9 elements"),
    ),
    "another share": (lambda c: c.all_gather(ones(8)), lambda c: c.all_gather(ones(9)), ("8 elements", "9 elements")),
    "other counts": (
        lambda c: c.all_gather(ones(c.rank + 1), counts=range(1, c.world_size + 1)),
        lambda c: c.all_gather(ones(c.rank + 1), counts=[9, *range(2, c.world_size + 1)]),
        ("all_gather #3", "counts"),
    ),
    "other parts": (
        lambda c: c.reduce_scatter(ones(4 * c.world_size)),
        lambda c: c.reduce_scatter(ones(4 * c.world_size), counts=[5, 3, *[4] * (c.world_size - 2)]),
        ("reduce_scatter #3", "counts"),
    ),
    "counts on one rank only": (
        lambda c: c.all_to_all(ones(c.world_size)),
        lambda c: c.all_to_all(ones(c.world_size), send_counts=[1] * c.world_size),
        ("all_to_all #3", "all_gather #3"),
    ),
    "another part of a scatter": (
        lambda c: c.scatter(ones(4 * c.world_size).reshape(-1, 4) if c.rank == 0 else None, 0, out=ones(4)),
        lambda c: c.scatter(None, 0, out=ones(5)),
        ("scatter #3", "elements"),
    ),
    "a decision": (lambda c: c.broadcast(ones(8)), lambda c: c.decide(ones(8), lambda s: s[0]), ("decide #3",)),
    "decisions of other sizes": (
        lambda c: c.decide(ones(8), lambda s: s[0][:2], 0, 2),
        lambda c: c.decide(ones(8), lambda s: s[0][:3], 0, 3),
        ("decide #3", "elements"),
    ),
    "one call more": (
        lambda c: c.all_reduce(ones(8)),
        lambda c: (c.all_reduce(ones(8)), c.all_reduce(ones(8)), c.all_gather(ones(8))),
        ("#4", "barrier"),
    ),
}  # fmt: skip


@everywhere
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", MISMATCHES)
def test_all_ranks_raise_and_both_sides_are_named(run_ranks, topology, order, world_size, name):
    """A rank whose part was to send alone may have returned; it raises in its next call, here a barrier."""
    usual, other, words = MISMATCHES[name]

    def body(comm):
        for _ in range(3):
            comm.all_reduce(ones(4))
        (other if comm.rank == world_size - 1 else usual)(comm)
        comm.barrier()
        comm.barrier()

    results = run_ranks(world_size, body, topology=topology, order=order, check=False)
    assert [type(r) for r in results] == [CollectiveMismatch] * world_size, results
    said = " | ".join({str(r) for r in results})
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("name", "in_what"),
    [
        ("another collective", "collective"),
        ("another operator", "operator"),
        ("fewer elements", "number of elements"),
        ("another schedule by size", "number of elements"),
        ("another integer", "dtype"),
        ("other counts", "counts"),
    ],
)
def test_the_difference_is_named(run_ranks, name, in_what):
    usual, other, _ = MISMATCHES[name]

    def body(comm):
        (other if comm.rank else usual)(comm)
        comm.barrier()

    results = run_ranks(2, body, check=False)
    assert any(f"they differ in: {in_what}" in str(r) for r in results), results
    assert not any("epoch" in str(r) or "schedule" in str(r) for r in results), results


def test_what_two_headers_differ_in():
    def header(**others):
        call = Call(
            **{"collective": "gather", "op": None, "kind": 200, "order": "rank", "n_elements": 8, "detail": 0, **others}
        )
        decoded = decode(call.header(0, 0, CODES[np.dtype(F32)], 32))
        assert decoded is not None
        return decoded

    assert header().differs_from(header(detail=1)) == "root"
    assert header().differs_from(header(detail=1, n_elements=9)) == "number of elements, root"
    assert header().differs_from(header(collective="reduce", detail=1)) == "collective"
    assert header(collective="all_gather").differs_from(header(collective="all_gather", detail=1)) == "counts"
    assert header().differs_from(header(schedule=3)) == "schedule (0 here, 3 there)"
    assert header().differs_from(header()) == ""


def test_later_calls_raise_the_same_cause(run_ranks):
    def body(comm):
        said = []
        for call in (
            lambda: comm.all_reduce(ones(3 + comm.rank)),
            lambda: comm.all_reduce(ones(3)),
            lambda: comm.barrier(),
            lambda: comm.broadcast(ones(3), async_op=True).wait(),
            lambda: comm.send(ones(3), 1 - comm.rank),
            lambda: comm.recv(ones(3), 1 - comm.rank),
            lambda: comm.split(0),
            lambda: comm.decide(ones(1), lambda s: s[0]),
        ):
            with pytest.raises(CollectiveMismatch) as caught:
                call()
            said.append(str(caught.value).partition(" (reported")[0])
        return said

    for said in run_ranks(2, body):
        assert len(set(said)) == 1


def test_queued_calls_raise_the_same_cause(run_ranks):
    def body(comm):
        works = [
            comm.all_reduce(ones(3 + comm.rank), async_op=True),
            *(comm.all_reduce(ones(3), async_op=True) for _ in range(3)),
        ]
        failures = []
        for work in works:
            with pytest.raises(CollectiveMismatch) as caught:
                work.wait(20)
            assert work.is_completed()
            assert type(work.exception()) is CollectiveMismatch
            failures.append(str(caught.value).partition(" (reported")[0])
        return failures

    for failures in run_ranks(2, body):
        assert len(set(failures)) == 1


@pytest.mark.parametrize("n_elements", [(1000, 999), (999, 1000), (1_000_000, 1), (1, 1_000_000), (0, 5), (5, 0)])
@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_short_and_long_messages(run_ranks, transport, n_elements):
    """A shorter message does not pass in silence, and a longer one does not hang."""
    results = run_ranks(2, lambda comm: comm.all_reduce(ones(n_elements[comm.rank])), transport=transport, check=False)
    assert [type(r) for r in results] == [CollectiveMismatch] * 2
    for r in results:
        assert f"{n_elements[0]} elements" in str(r)
        assert f"{n_elements[1]} elements" in str(r)


def test_what_a_decision_raises_is_raised_everywhere(run_ranks):
    def choose(stacked: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError("no such token")

    results = run_ranks(3, lambda comm: comm.decide(ones(2), choose, 1), check=False)
    assert all(isinstance(r, HostringError) and "no such token" in str(r) and r.rank == 1 for r in results)


def test_recv_counts_that_are_not_what_comes(run_ranks):
    def body(comm):
        comm.all_to_all(ones(4), send_counts=[1, 3], recv_counts=[1, 1] if comm.rank == 0 else [2, 3])
        comm.barrier()

    results = run_ranks(2, body, check=False)
    assert [type(r) for r in results] == [CollectiveMismatch] * 2
    assert "expects [2, 3] rows, the others send it [3, 3]" in str(results[0])


def test_two_ranks_that_wait_for_each_other_in_different_calls(run_ranks):
    """Each is the root of its own reduction and sends nothing: found out by asking, long before the deadline."""
    results = run_ranks(2, lambda comm: comm.reduce(ones(8), comm.rank), timeout=50.0, check=False)
    assert [type(r) for r in results] == [CollectiveMismatch] * 2
    for r in results:
        assert "reduce #0 of 8 elements, float32, op sum, root 0" in str(r)
        assert "reduce #0 of 8 elements, float32, op sum, root 1" in str(r)


def test_groups_that_declare_different_things_are_refused_at_the_start():
    """Different order or topology is found in the handshake, before there is a group."""
    for what, values in (("order", ("rank", "tree")), ("topology", ("mesh", "star"))):
        store = MemoryStore()
        with ThreadPoolExecutor(2) as pool:
            starts = [
                pool.submit(hostring.init, rank, 2, transport="memory", timeout=10, store=store, **{what: value})
                for rank, value in enumerate(values)
            ]
        for start in starts:
            exc = start.exception()
            assert isinstance(exc, hostring.HandshakeError)
            assert all(value in str(exc) for value in values)
