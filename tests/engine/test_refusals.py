"""Misuse is a ValueError or TypeError before a byte moves, and the group stays usable."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import hostring
from hostring.arrays.dtypes import BY_NAME, NAMES

F32 = np.ones(6, np.float32)
FLOATS = [n for n in NAMES if "float" in n]
COMPLEX = ["complex64", "complex128"]
WHOLE = [n for n in NAMES if "int" in n or n == "bool"]
TABLE = [
    *itertools.product(FLOATS, ["band", "bor", "bxor"]),
    *itertools.product(COMPLEX, ["min", "max", "band", "bor", "bxor"]),
    *itertools.product(WHOLE, ["avg"]),
]

REFUSED = {
    "an unknown operator": (ValueError, "median", lambda c: c.all_reduce(F32, "median")),
    "an unknown operator of reduce": (ValueError, "median", lambda c: c.reduce(F32, 0, "median")),
    "an unknown operator of reduce_scatter": (ValueError, "median", lambda c: c.reduce_scatter(F32, "median")),
    "no array": (TypeError, "not an array", lambda c: c.all_reduce([1.0, 2.0])),
    "no array to broadcast": (TypeError, "not an array", lambda c: c.broadcast(3.0)),
    "no array to gather": (TypeError, "not an array", lambda c: c.all_gather("text")),
    "text": (TypeError, "can't travel", lambda c: c.all_reduce(np.array(["a"]))),
    "objects": (TypeError, "can't travel", lambda c: c.broadcast(np.array([object()]))),
    "dates": (TypeError, "can't travel", lambda c: c.all_gather(np.array(["2020-01-01"], "M8[D]"))),
    "records": (TypeError, "can't travel", lambda c: c.all_to_all(np.zeros(3, "i4,f4"))),
    "long doubles": (TypeError, "can't travel", lambda c: c.gather(np.zeros(3, np.longdouble))),
    "text to send": (TypeError, "can't travel", lambda c: c.send(np.array(["a"]), (c.rank + 1) % 3)),
    "text to receive": (TypeError, "can't travel", lambda c: c.recv(np.array(["a"]), (c.rank + 1) % 3)),
    "text to decide on": (TypeError, "can't travel", lambda c: c.decide(np.array(["a"]), max)),
    "a root above": (ValueError, "root=3", lambda c: c.broadcast(F32, 3)),
    "a root below": (ValueError, "root=-1", lambda c: c.reduce(F32, -1)),
    "a root of gather": (ValueError, "root=7", lambda c: c.gather(F32, 7)),
    "a root of scatter": (ValueError, "root=7", lambda c: c.scatter(F32, 7, out=F32)),
    "a root of decide": (ValueError, "root=7", lambda c: c.decide(F32, max, 7)),
    "a decision of less than nothing": (ValueError, "n=-1", lambda c: c.decide(F32, max, 0, -1)),
    "a decision of half an element": (TypeError, "'float'", lambda c: c.decide(F32, max, 0, 1.5)),
    "a decision of two dimensions": (TypeError, "'tuple'", lambda c: c.decide(F32, max, 0, (2, 2))),
    "a root that is no integer": (TypeError, "integer", lambda c: c.broadcast(F32, 0.5)),
    "rows that don't divide": (ValueError, "7 rows don't divide", lambda c: c.reduce_scatter(np.ones(7))),
    "no rows to divide to all": (TypeError, "0-d array has no rows", lambda c: c.all_to_all(np.array(7.0))),
    "rows that don't divide to all": (ValueError, "7 rows don't divide", lambda c: c.all_to_all(np.ones(7))),
    "no rows": (TypeError, "no rows to divide", lambda c: c.reduce_scatter(np.array(1.0))),
    "counts of another sum": (ValueError, "add up to 6", lambda c: c.reduce_scatter(F32, counts=[1, 2, 4])),
    "counts below zero": (ValueError, "add up to 6", lambda c: c.reduce_scatter(F32, counts=[-1, 3, 4])),
    "counts of two ranks": (ValueError, "counts", lambda c: c.all_gather(F32, counts=[6, 6])),
    "counts that are not what is brought": (ValueError, "brings 6 rows", lambda c: c.all_gather(F32, counts=[1, 2, 3])),
    "counts of a 0-d array": (ValueError, "0-d", lambda c: c.all_gather(np.array(1.0), counts=[1, 1, 1])),
    "negative counts": (
        ValueError, "counts", lambda c: c.gather(F32, counts=[-6 if r != c.rank else 6 for r in range(3)]),
    ),
    "send counts of another sum": (ValueError, "add up to 6", lambda c: c.all_to_all(F32, send_counts=[3, 3, 3])),
    "a small out": (ValueError, "out has 17 elements", lambda c: c.all_gather(F32, out=np.empty(17, np.float32))),
    "a large out": (ValueError, "out has 3 elements", lambda c: c.reduce_scatter(F32, out=np.empty(3, np.float32))),
    "a strided out of another size": (
        ValueError, "out has 17", lambda c: c.all_gather(F32, out=np.empty(34, np.float32)[::2]),
    ),
    "an out of another float": (
        TypeError, "out is float16", lambda c: c.all_gather(F32, out=np.empty((3, 6), np.float16)),
    ),
    "an out of integers": (TypeError, "out is int32", lambda c: c.all_gather(F32, out=np.empty((3, 6), np.int32))),
    "an out of double width": (TypeError, "out is float64", lambda c: c.reduce_scatter(F32, out=np.empty(2))),
    "an out of exchanged integers": (TypeError, "out is int32", lambda c: c.all_to_all(F32, out=np.empty(6, np.int32))),
    "an out that is no array": (TypeError, "not an array", lambda c: c.all_gather(F32, out=[0.0] * 18)),
    "a scatter without out, or of no array": (ValueError, "scatter", lambda c: c.scatter(None, 1)),
    "a scatter of too few rows": (ValueError, "scatter|counts", lambda c: c.scatter(F32, c.rank)),
    "a part that is not as large as counted": (
        ValueError, "scatter", lambda c: c.scatter(None, (c.rank + 1) % 3, counts=[1, 2, 3], out=np.empty(9)),
    ),
    "a destination above": (ValueError, "dst=3", lambda c: c.send(F32, 3)),
    "a source below": (ValueError, "src=-2", lambda c: c.recv(F32, -2)),
    "itself": (ValueError, "itself", lambda c: c.send(F32, c.rank)),
    "from itself": (ValueError, "itself", lambda c: c.recv(F32, c.rank)),
    "a negative tag": (ValueError, "tag=-1", lambda c: c.send(F32, (c.rank + 1) % 3, tag=-1)),
    "a negative tag to receive": (ValueError, "tag=-1", lambda c: c.recv(F32, (c.rank + 1) % 3, tag=-1)),
    "a tag of more than 64 bits": (ValueError, "tag", lambda c: c.send(F32, (c.rank + 1) % 3, tag=1 << 64)),
    "a negative colour": (ValueError, "color=-1", lambda c: c.split(-1)),
    "a split into what can't be": (ValueError, "order='rank' can't be held", lambda c: c.split(0, topology="tree")),
    "a split into what is unknown": (ValueError, "donut", lambda c: c.split(0, topology="donut")),
    "a collective that is not there": (
        ValueError, "all_reduce_twice", lambda c: c.expected_payload("all_reduce_twice", 1),
    ),
}  # fmt: skip


def refusal(call, *args) -> BaseException | None:
    try:
        call(*args)
    except Exception as exc:
        return exc
    return None


def still_works(comm: hostring.Comm) -> None:
    assert comm.all_reduce(np.array([comm.rank + 1.0])).tolist() == [comm.world_size * (comm.world_size + 1) / 2]


@pytest.mark.parametrize("topology", ["mesh", "star"])
def test_every_refusal_leaves_the_group_usable(run_ranks, topology):
    def body(comm):
        for name, (kind, words, call) in REFUSED.items():
            before = comm.counters.payload_sent, comm.counters.header_sent
            exc = refusal(call, comm)
            assert isinstance(exc, kind), f"{name}: {exc!r}"
            assert re.search(words, str(exc)), f"{name}: {exc!r}"
            assert (comm.counters.payload_sent, comm.counters.header_sent) == before, name
        still_works(comm)
        return True

    assert run_ranks(3, body, topology=topology) == [True] * 3


def test_the_table_of_dtypes_and_operators_is_refused_up_front_on_every_path(run_ranks):
    def body(comm):
        for name, op in TABLE:
            x = np.zeros(6, BY_NAME[name])
            for call in (comm.all_reduce, comm.reduce_scatter, lambda x, op: comm.reduce(x, 0, op)):
                with pytest.raises(TypeError, match=name if op != "avg" else "avg"):
                    call(x, op)
            with pytest.raises(TypeError):  # before it is queued, and not in the work
                comm.all_reduce(x, op, async_op=True)
        still_works(comm)
        return True

    assert len(TABLE) > 40
    assert run_ranks(2, body) == [True] * 2


def test_a_refusal_on_one_rank_alone_can_be_mended(run_ranks):
    """The others wait in the same call; when the rank comes with the right array, all go on."""

    def body(comm):
        if comm.rank == 1:
            with pytest.raises(TypeError):
                comm.all_reduce(np.array(["wrong"]))
        return comm.all_reduce(np.array([1.0])).tolist()

    assert run_ranks(3, body) == [[3.0]] * 3


def test_a_world_of_one_refuses_the_same(run_ranks):
    def body(comm):
        for call in (
            lambda: comm.all_reduce(F32, "median"),
            lambda: comm.broadcast(F32, 1),
            lambda: comm.all_gather(F32, counts=[5]),
            lambda: comm.all_gather(F32, out=np.empty(5, np.float32)),
            lambda: comm.reduce_scatter(F32, counts=[5]),
            lambda: comm.scatter(F32, counts=[2]),
            lambda: comm.send(F32, 0),
        ):
            with pytest.raises(ValueError, match=r"median|root=1|counts|elements|itself"):
                call()
        with pytest.raises(TypeError):
            comm.all_reduce(np.zeros(3), "band")
        assert comm.all_reduce(F32) is F32
        return True

    assert run_ranks(1, body) == [True]


@pytest.mark.parametrize(
    ("words", "kwargs"),
    [
        ("order='rank' can't be held by topology='tree'", {"topology": "tree"}),
        ("donut", {"topology": "donut"}),
        ("alphabetical", {"order": "alphabetical"}),
        ("pigeon", {"transport": "pigeon"}),
        ("timeout", {"timeout": 0.0}),
        ("timeout", {"timeout": float("nan")}),
    ],
)
def test_init_refuses_at_once(words, kwargs):
    with pytest.raises(ValueError, match=words):
        hostring.init(0, 2, **{"transport": "memory", "store": object(), **kwargs})


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (0, None), (None, 2)])
def test_init_refuses_ranks_that_can_not_be(rank, world_size):
    with pytest.raises(ValueError, match="rank"):
        hostring.init(rank, world_size, transport="memory")


def test_ranks_and_counts_may_be_numpy_integers_on_some_ranks_only(run_ranks):
    """Ranks compare what they were asked for: the same number of another type is the same number."""

    def body(comm):
        number = np.int64 if comm.rank == 1 else int
        counts = [number(c) for c in (2, 1, 3)]
        x = np.full(int(counts[comm.rank]), float(comm.rank))
        comm.broadcast(x[:1].copy(), number(2))
        gathered = comm.gather(x, number(1), counts=counts)
        assert (gathered is None) == (comm.rank != 1)
        comm.reduce_scatter(np.ones(6), counts=counts)
        comm.all_to_all(np.ones(6), send_counts=counts)
        comm.scatter(np.ones(6) if comm.rank == 0 else None, number(0), counts=counts, out=np.empty(counts[comm.rank]))
        return comm.all_gather(x, counts=counts).tolist()

    assert run_ranks(3, body) == [[0.0, 0.0, 1.0, 2.0, 2.0, 2.0]] * 3
