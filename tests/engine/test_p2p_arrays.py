"""Point-to-point messages and the arrays that they come from and go to: dtypes, layouts, lifetimes, and misfits."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from oracle import bits, rank_distinct

from hostring import CollectiveMismatch
from hostring.arrays.dtypes import BY_NAME, NAMES


def test_what_is_sent_may_be_dropped_by_the_caller(run_ranks):
    """The array of an asynchronous send is kept alive, also where what travels is only a view of it."""
    torch = pytest.importorskip("torch")
    n_elements = 2_000_000

    def body(comm):
        if comm.rank == 0:
            work = comm.send(torch.full((n_elements,), 7.0), 1, async_op=True)
            gc.collect()
            junk = [torch.full((n_elements,), -1.0) for _ in range(4)]
            comm.send(np.zeros(1), 1, tag=1)
            work.wait()
            return len(junk)
        comm.recv(np.empty(1), 0, tag=1)
        return set(comm.recv(np.empty(n_elements, np.float32), 0).tolist())

    assert run_ranks(2, body)[1] == {7.0}


@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (np.zeros(5), np.zeros(7)),
        (np.zeros(7), np.zeros(5)),
        (np.zeros(0), np.zeros(1)),
        (np.zeros(1), np.zeros(0)),
        (np.zeros(4, np.int32), np.zeros(4, np.int64)),
        (np.zeros(4, np.float32), np.zeros(4, np.int32)),
        (np.zeros(4, np.complex64), np.zeros(4, np.float32)),
        (np.zeros(200_000), np.zeros(7)),
        (np.zeros(7), np.zeros(200_000)),
    ],
    ids=lambda x: f"{x.size}x{x.dtype}",
)
def test_a_message_that_does_not_fit_raises_on_both_sides(run_ranks, sent, expected, first):
    """The receiver knows at once; the sender, whose small message is gone before, learns it in its next call."""

    def body(comm):
        if comm.rank == 0:
            if first == "receive":
                time.sleep(0.05)
            comm.send(sent.copy(), 1)
        else:
            if first == "send":
                time.sleep(0.05)
            comm.recv(expected.copy(), 0)
        comm.barrier()

    results = run_ranks(2, body, check=False)
    assert [type(r) for r in results] == [CollectiveMismatch] * 2
    for r in results:
        assert f"sent {sent.size} elements of {sent.dtype}" in str(r)
        assert f"expects {expected.size} of {expected.dtype}" in str(r)


def test_all_dtypes_and_layouts(run_ranks):
    arrays = [rank_distinct(2, 24, BY_NAME[name])[0].reshape(4, 6) for name in NAMES]

    def body(comm):
        got = []
        for x in arrays:
            if comm.rank == 0:
                comm.send(x[::2, ::3], 1)
                comm.send(np.array(x[0, 0]), 1)
            else:
                into = np.zeros((4, 4), x.dtype)
                view = into[::2, ::2]
                assert comm.recv(view, 0) is view
                got.append((bits(into[::2, ::2]), set(into[1].tolist()), bits(comm.recv(np.zeros((), x.dtype), 0))))
        return got

    for x, (strided, between, scalar) in zip(arrays, run_ranks(2, body)[1], strict=True):
        assert strided == bits(x[::2, ::3])
        assert between == set(np.zeros(1, x.dtype).tolist())
        assert scalar == bits(x[0, 0])


def test_a_read_only_target_gives_a_new_array(run_ranks):
    def body(comm):
        if comm.rank == 0:
            return comm.send(np.arange(5), 1)
        target = np.zeros(5, np.int64)
        target.flags.writeable = False
        got = comm.recv(target, 0)
        assert not target.any()
        return got.tolist()

    assert run_ranks(2, body)[1] == [0, 1, 2, 3, 4]
