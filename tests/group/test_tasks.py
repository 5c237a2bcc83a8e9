"""Coroutines that wait for sockets, in the calling thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from hostring.group.tasks import Task, Tasks, all_done, first_done, readable, sleep, writable


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


def run(tasks: Tasks, *wanted: Task) -> None:
    until = time.monotonic() + 10
    while not all(task.done for task in wanted):
        assert time.monotonic() < until
        tasks.turn(until)


async def received(sock: socket.socket) -> bytes:
    await readable(sock)
    return sock.recv(100)


async def failing() -> None:
    await sleep(0.001)
    raise ValueError("of a task")


def test_a_task_goes_on_when_its_socket_has_something(pair: tuple[socket.socket, socket.socket]) -> None:
    tasks = Tasks()
    waiting = tasks.start(received(pair[0]))
    tasks.turn(0.0)
    assert not waiting.done
    pair[1].send(b"word")
    run(tasks, waiting)
    assert waiting.result == b"word"


def test_waiting_ends_at_its_time(pair: tuple[socket.socket, socket.socket]) -> None:
    tasks = Tasks()
    late = tasks.start(readable(pair[0], time.monotonic() + 0.01))
    run(tasks, late)
    assert isinstance(late.error, TimeoutError)
    ready = tasks.start(writable(pair[0], time.monotonic() + 10))
    run(tasks, ready)
    assert ready.error is None


def test_the_first_and_the_last_of_several(pair: tuple[socket.socket, socket.socket]) -> None:
    tasks = Tasks()
    slow, quick = tasks.start(received(pair[0])), tasks.start(sleep(0.001))
    run(tasks, tasks.start(first_done([slow, quick])))
    assert (slow.done, quick.done) == (False, True)
    nothing = tasks.start(first_done([slow], 0.001))
    run(tasks, nothing)
    assert not slow.done
    every = tasks.start(all_done([slow, quick]))
    pair[1].send(b"word")
    run(tasks, every)
    assert slow.result == b"word"
    failed = tasks.start(all_done([tasks.start(failing())]))
    run(tasks, failed)
    assert str(failed.error) == "of a task"


def test_a_cancelled_task_cleans_up_and_its_descriptor_may_serve_another(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Both sockets have something in one turn; the first task ends the second, and opens a socket with its number."""
    tasks, seen = Tasks(), []
    first_ours, first_theirs = socket.socketpair()

    async def closing(sock: socket.socket) -> None:
        try:
            await readable(sock)
            seen.append("ended task went on")
        finally:
            sock.close()

    async def third(sock: socket.socket) -> None:
        await readable(sock)
        seen.append("has nothing to read")

    async def ending(sock: socket.socket) -> None:
        await readable(sock)
        number = victim_sock.fileno()
        tasks.cancel(victim)
        other = socket.socketpair()
        kept.extend(other)
        assert number in [sock.fileno() for sock in other]
        tasks.start(third(next(sock for sock in other if sock.fileno() == number)))

    kept: list[socket.socket] = []
    victim_sock, victim_theirs = socket.socketpair()
    ender = tasks.start(ending(first_ours))
    victim = tasks.start(closing(victim_sock))
    first_theirs.send(b"x")
    victim_theirs.send(b"x")
    run(tasks, ender)
    assert ender.error is None
    assert victim.done
    assert seen == []
    tasks.end()
    for sock in (first_ours, first_theirs, victim_theirs, *kept):
        sock.close()
