"""Turns: first in, first out over all threads, worked off by the daemon or by whoever waits."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hostring.engine.work import Turns


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


def test_whoever_waits_carries_it_out():
    turns = Turns("t")
    turns.submit(lambda: None, "starts the thread").wait()
    threads: set[int] = set()
    for _ in range(20):
        works = [turns.submit(lambda: threads.add(threading.get_ident()), "job") for _ in range(3)]
        works[2].wait()
    assert threading.get_ident() in threads
    assert turns.close(5)


def test_what_nobody_waits_for_is_done_all_the_same():
    turns = Turns("t")
    for pause in (0.0, 0.3):  # while the thread ticks, and after it has gone to sleep
        time.sleep(pause)
        work = turns.submit(threading.get_ident, "job")
        give_up = time.monotonic() + 5
        while not work.is_completed() and time.monotonic() < give_up:
            time.sleep(0.001)
        assert work.wait() != threading.get_ident()
    assert turns.close(5)


def test_a_callback_does_not_wait_for_the_tick():
    turns = Turns("t")
    turns.submit(lambda: None, "starts the thread").wait()
    done = threading.Event()
    work = turns.submit(threading.get_ident, "job")
    work.add_done_callback(lambda _: done.set())
    assert done.wait(5)
    assert turns.close(5)


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
