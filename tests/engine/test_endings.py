"""How a group ends: closed after its work, aborted from any thread, left by an exception or by Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from hostring import GroupClosedError, HostringError, PeerLostError
from hostring.arrays.dtypes import CODES
from hostring.engine.frames import message_header

SOON = 5.0  # seconds; what is told to the others takes milliseconds, the deadline of these groups is 20 s
TOPOLOGIES = [("mesh", "rank"), ("ring", "rank"), ("star", "rank"), ("tree", "tree")]
everywhere = pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)


def ones(n_elements: int = 4) -> np.ndarray:
    return np.ones(n_elements)


def repeated(call) -> None:
    """A rank may have done its part in a call before it goes: a later one needs it."""
    for _ in range(4):
        call()


CALLS = {
    "all_reduce": lambda c: c.all_reduce(ones()),
    "reduce": lambda c: c.reduce(ones()),
    "broadcast": lambda c: c.broadcast(ones()),
    "all_gather": lambda c: c.all_gather(ones()),
    "gather": lambda c: c.gather(ones()),
    "scatter": lambda c: c.scatter(ones(c.world_size), out=np.empty(())),
    "reduce_scatter": lambda c: c.reduce_scatter(ones(2 * c.world_size)),
    "all_to_all": lambda c: c.all_to_all(ones(2 * c.world_size)),
    "barrier": lambda c: c.barrier(),
    "decide": lambda c: c.decide(ones(), lambda s: s[0]),
    "split": lambda c: c.split(0),
    "asynchronously": lambda c: c.all_reduce(ones(), async_op=True).wait(),
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_after_close_every_call_says_so(run_ranks, world_size):
    def body(comm):
        CALLS["all_reduce"](comm)
        comm.close()
        comm.close()
        for call in CALLS.values():
            with pytest.raises(GroupClosedError, match=f"rank {comm.rank} has closed this group"):
                call(comm)
        if world_size > 1:
            with pytest.raises(HostringError):
                comm.send(ones(), 1 - comm.rank)
            with pytest.raises(HostringError):
                comm.recv(ones(), 1 - comm.rank)
        return True

    assert run_ranks(world_size, body) == [True] * world_size


@everywhere
def test_close_works_off_what_was_accepted(run_ranks, topology, order):
    def body(comm):
        works = [comm.all_reduce(np.full(3000, k + comm.rank), async_op=True) for k in range(20)]
        comm.close()
        return [float(w.wait(SOON)[0]) for w in works]

    assert run_ranks(3, body, topology=topology, order=order) == [[3.0 * k + 3 for k in range(20)]] * 3


def test_close_sends_the_messages_that_were_accepted(run_ranks):
    def body(comm):
        if comm.rank == 0:
            comm.send(np.arange(400_000.0), 1, async_op=True)
            comm.close()
            return None
        time.sleep(0.1)
        return float(comm.recv(np.empty(400_000), 0).sum())

    assert run_ranks(2, body)[1] == float(np.arange(400_000.0).sum())


@everywhere
def test_whoever_waits_for_a_rank_that_closed_fails_soon(run_ranks, topology, order):
    def body(comm):
        if comm.rank == 2:
            comm.barrier()
            comm.close()
            return 0.0
        started = time.monotonic()
        with pytest.raises(HostringError):
            repeated(comm.barrier)
        return time.monotonic() - started

    assert max(run_ranks(3, body, topology=topology, order=order)) < SOON


@everywhere
def test_abort_from_another_thread_ends_the_call_everywhere(run_ranks, topology, order):
    """Rank 1 never comes; a thread of rank 2, whose call is under way, gives up for all."""

    def body(comm):
        if comm.rank == 1:
            time.sleep(0.3)
        elif comm.rank == 2:
            threading.Timer(0.1, comm.abort, ["the watchdog barked"]).start()
        started = time.monotonic()
        try:
            comm.all_reduce(ones(50_000))
            comm.barrier()
        except HostringError as exc:
            return str(exc), exc.rank, time.monotonic() - started
        return None

    for message, rank, seconds in run_ranks(3, body, topology=topology, order=order):
        assert "rank 2 aborted the group: the watchdog barked" in message
        assert rank == 2
        assert seconds < SOON


def test_abort_at_any_moment_gives_that_cause_and_no_other(run_ranks):
    """However far a call has come: no stray exception of a closed socket gets through."""

    def body(comm):
        if comm.rank == 0:
            threading.Timer(0.02, comm.abort, ["enough"]).start()
        while True:
            comm.all_reduce(ones(2000))

    for transport in ("memory", "tcp", "unix") * 3:
        for result in run_ranks(3, body, transport=transport, check=False):
            assert isinstance(result, HostringError), (transport, repr(result))
            assert "enough" in str(result) or "aborted" in str(result), (transport, repr(result))


def test_abort_ends_queued_work_and_messages(run_ranks):
    def body(comm):
        if comm.rank == 1:
            time.sleep(0.1)
            comm.abort("no more")
            return None
        works = [comm.all_reduce(ones(), async_op=True) for _ in range(3)] + [comm.recv(ones(), 1, async_op=True)]
        said = []
        for work in works:
            with pytest.raises(HostringError) as caught:
                work.wait(SOON)
            assert work.is_completed()
            said.append(str(caught.value))
        return said

    said = run_ranks(2, body)[0]
    assert all("no more" in words for words in said)


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
def test_abort_in_the_middle_of_a_message_ends_the_thread_that_receives_it(run_ranks, transport):
    here, over = threading.Event(), threading.Event()

    def body(comm):
        if comm.rank == 1:
            header = message_header(0, 0, 1_000_000, CODES[np.dtype(np.float64)], 8_000_000, comm.session.group.epoch)
            assert comm.session.group.p2p[0].send([header, bytes(1000)]) == len(header) + 1000
            here.set()
            assert over.wait(SOON)
            return True
        assert here.wait(SOON)
        work = comm.recv(np.empty(1_000_000), 1, async_op=True)
        time.sleep(0.05)
        comm.abort("no more")
        messenger, end = comm.session.messenger, time.monotonic() + SOON
        while messenger.runs_in_background and time.monotonic() < end:
            time.sleep(0.01)
        over.set()
        return work.is_completed(), messenger.runs_in_background

    assert run_ranks(2, body, transport=transport)[0] == (True, False)


def test_an_exception_that_leaves_the_block_is_told_to_all(run_ranks):
    def body(comm):
        if comm.rank == 1:
            raise LookupError("the file is not there")
        comm.barrier()

    results = run_ranks(3, body, check=False)
    assert isinstance(results[1], LookupError)
    for r in (0, 2):
        assert isinstance(results[r], HostringError)
        assert "LookupError: the file is not there" in str(results[r])
        assert results[r].rank == 1


@everywhere
def test_a_rank_that_vanishes_is_named(run_ranks, topology, order):
    """Its links break without a word, as when a process is killed. (Processes: see test_faults.)"""

    def body(comm):
        if comm.rank == 2:
            comm.all_reduce(ones(10_000))
            for link in comm.session.group.links:
                link.abort()
            return None
        started = time.monotonic()
        with pytest.raises(HostringError) as caught:
            repeated(lambda: comm.all_reduce(ones(10_000)))
        again = []
        for call in (CALLS["barrier"], CALLS["asynchronously"], lambda c: c.recv(ones(), 2)):
            with pytest.raises(HostringError) as later:
                call(comm)
            again.append(later.value.rank)
        return type(caught.value), caught.value.rank, again, time.monotonic() - started

    for result in run_ranks(4, body, topology=topology, order=order):
        if result is not None:
            kind, rank, again, seconds = result
            assert kind is PeerLostError
            assert [rank, *again] == [2] * 4
            assert seconds < SOON


def interrupted(comm):
    comm.barrier()
    if comm.rank == 1:
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    started = time.monotonic()
    try:
        if comm.rank != 0:
            comm.all_reduce(ones(1000))
        else:
            time.sleep(0.6)
            comm.barrier()
    except BaseException as exc:
        return type(exc).__name__, str(exc), time.monotonic() - started
    return None


def test_ctrl_c_leaves_the_call_at_once_and_the_others_are_told(run_processes):
    """Rank 0 is late, rank 1 is interrupted in its call: nobody waits for the deadline of 30 s."""
    outcome = run_processes(3, interrupted)
    assert [kind for kind, _ in outcome] == ["ok"] * 3
    for rank, (_, (name, message, seconds)) in enumerate(outcome):
        assert seconds < SOON
        if rank == 1:
            assert name == "KeyboardInterrupt"
        else:
            assert name == "HostringError"
            assert "rank 1 left a call by KeyboardInterrupt" in message


def test_groups_can_follow_each_other_on_one_store(run_ranks):
    from hostring.rendezvous import MemoryStore

    store = MemoryStore()
    for _ in range(3):
        assert run_ranks(2, lambda comm: float(comm.all_reduce(np.ones(()))), store=store) == [2.0, 2.0]


@pytest.mark.parametrize("end", ["close", "abort"])
def test_threads_and_descriptors_are_given_back(run_ranks, end):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def body(comm):
        comm.all_reduce(ones(), async_op=True).wait()
        comm.recv(ones(), comm.rank ^ 1, async_op=True)
        comm.send(ones(), comm.rank ^ 1)
        comm.barrier()
        sub = comm.split(0)
        sub.barrier()
        sub.recv(ones(), sub.rank ^ 1, async_op=True)
        comm.barrier()  # who aborts now can't take the end of the barrier from the other
        sub.close() if end == "close" else sub.abort()

    run_ranks(2, body, transport="tcp")
    time.sleep(0.05)
    files, threads = open_files(), threading.active_count()
    for transport in ("tcp", "unix", "memory"):
        run_ranks(2, body, transport=transport)
    end = time.monotonic() + SOON
    while (open_files() > files or threading.active_count() > threads) and time.monotonic() < end:
        time.sleep(0.02)
    assert open_files() <= files
    assert threading.active_count() <= threads
