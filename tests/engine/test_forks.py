"""Processes that fork: a child can't use its parent's group, and does not hide its parent's death."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from lost_ranks import SOON, failure_of, numbers

import hostring
from hostring import GroupClosedError

pytestmark = pytest.mark.faults


def in_child(body: Any) -> int:
    """The exit code of a forked child that runs `body`."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def fork_and_go_on(comm: hostring.Comm) -> list[float]:
    comm.all_reduce(numbers(comm.rank), async_op=True).wait()

    def child() -> None:
        calls = [
            lambda: comm.all_reduce(numbers(comm.rank)),
            lambda: comm.all_reduce(numbers(comm.rank), async_op=True).wait(5),
            lambda: comm.send(numbers(0), (comm.rank + 1) % 3),
            lambda: comm.recv(numbers(0)),
            comm.barrier,
            comm.rebuild,
        ]
        for call in calls:
            with pytest.raises(GroupClosedError, match=f"forked from that of rank {comm.rank}"):
                call()
        comm.close()
        comm.abort()

    code = in_child(child) if comm.rank != 2 else 0
    assert code == 0, f"the child ended with {code}"
    comm.barrier()
    return [float(v) for v in comm.all_reduce(numbers(comm.rank))]


@pytest.mark.parametrize("transport", ["auto", "tcp", "unix"])
def test_a_forked_child_is_refused_and_does_its_parent_no_harm(run_processes: Any, transport: str) -> None:
    expected = [float(v) for v in numbers(0) + numbers(1) + numbers(2)]
    assert run_processes(3, fork_and_go_on, transport=transport) == [("ok", expected)] * 3


def fork_and_die(comm: hostring.Comm) -> Any:
    comm.barrier()
    if comm.rank == 1:
        if os.fork() == 0:
            time.sleep(SOON + 2)  # a worker that outlives its parent
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return failure_of(comm)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_child_that_lives_on_does_not_hide_its_parents_death(run_processes: Any, transport: str) -> None:
    outcome = run_processes(3, fork_and_die, transport=transport)
    for rank in (0, 2):
        kind, value = outcome[rank]
        assert kind == "ok", value
        assert value[:2] == ("PeerLostError", 1)
        assert value[2] < SOON
