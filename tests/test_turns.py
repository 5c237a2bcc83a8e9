"""Turns: first in, first out over all threads, worked off by the daemon or by whoever waits."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hostring.work import Turns


def blocked(turns: Turns) -> threading.Event:
    """Occupies the worker until the event is set."""
    begun, release = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        release.wait(10)

    turns.submit(job, "blocker")
    assert begun.wait(5)
    return release


def test_order_is_kept_between_queued_and_blocking_calls():
    turns, seen = Turns("t"), []
    release = blocked(turns)
    works = [turns.submit(lambda k=k: seen.append(k), f"job {k}") for k in range(5)]
    threading.Timer(0.05, release.set).start()
    turns.run(seen.append, "last", 5)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert all(w.is_completed() for w in works)
    assert turns.close(5)


def test_whoever_waits_works_off_what_nobody_has_begun():
    turns = Turns("t")
    turns.turn.acquire()  # the worker finds the turn taken, as when it is late
    threads: list[int] = []
    works = [turns.submit(lambda: threads.append(threading.get_ident()), "job") for _ in range(3)]
    time.sleep(0.05)
    turns._thread, worker = None, turns._thread  # a worker that never comes
    turns._wake.put(False)
    turns.turn.release()
    works[2].wait()
    assert len(threads) == 3
    assert worker is not None
    worker.join(5)
    assert set(threads) <= {threading.get_ident(), worker.ident}


def test_a_waiter_stops_at_its_own_work():
    turns = Turns("t")
    turns._start = lambda: None  # type: ignore[method-assign]
    seen: list[str] = []
    first = turns.submit(lambda: seen.append("first"), "first")
    second = turns.submit(lambda: seen.append("second"), "second")
    first.wait()
    assert seen == ["first"]
    assert not second.is_completed()
    second.wait()
    assert seen == ["first", "second"]


def test_a_bounded_wait_does_not_start_the_work_itself():
    turns = Turns("t")
    turns._start = lambda: None  # type: ignore[method-assign]
    work = turns.submit(lambda: 1, "job")
    with pytest.raises(TimeoutError, match=r"job was not done within 0\.0 s"):
        work.wait(0.01)
    assert work.wait() == 1


def test_calls_inside_a_turn_run_at_once(run_ranks):
    def body(comm):
        x = np.arange(4.0, dtype=np.float32) + comm.rank

        def both():
            comm.all_reduce(x)
            comm.barrier()
            return comm.all_gather(x)

        blocking = comm.turn(both).copy()
        queued = comm.turn(both, async_op=True).wait()
        return blocking, queued

    for blocking, queued in run_ranks(3, body):
        np.testing.assert_array_equal(blocking, np.tile(3 * np.arange(4.0, dtype=np.float32) + 3, (3, 1)))
        np.testing.assert_array_equal(queued, 3 * blocking)


def test_an_error_reaches_the_waiter_and_the_turn_is_free_again():
    turns = Turns("t")
    work = turns.submit(lambda: 1 / 0, "job")
    with pytest.raises(ZeroDivisionError):
        work.wait()
    assert turns.run(lambda: 7, "next") == 7
    assert turns.close(5)
