"""Ranks for tests: threads for the matrix of cases, spawned processes for what a process must do. Nothing here can
hang.

`tests/torch_ranks.py` keeps worker processes alive between tests, because they import torch;
`tests/engine/test_faults.py` has runners of its own, because its ranks are killed and stopped.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import hostring
from hostring.rendezvous import MemoryStore

DEADLINE_S = 110.0  # for all ranks together; long, for machines that do other things too


class RankFailed(AssertionError):
    """A rank raised. The message holds its traceback, `errors` the exception."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        words = ["".join(traceback.format_exception(exc)) for exc in errors.values()]
        super().__init__(f"ranks {sorted(errors)} failed:\n" + "\n".join(words))
        self.errors = errors


def side_by_side(jobs: Sequence[Callable[[], Any]], deadline: float = DEADLINE_S) -> list[Any]:
    """Run each job in a thread of its own, named "rank i". Returns results; for a job that raised, its exception.

    A job that isn't done by the deadline gives a TimeoutError.
    """
    results: list[Any] = [TimeoutError(f"rank {i} hangs") for i in range(len(jobs))]

    def body(i: int) -> None:
        try:
            results[i] = jobs[i]()
        except BaseException as exc:
            results[i] = exc

    threads = [threading.Thread(target=body, args=(i,), name=f"rank {i}", daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return list(results)


def successes(results: Sequence[Any]) -> list[Any]:
    """What `side_by_side` returned.

    Raises:
        RankFailed: a job raised, or wasn't done.
    """
    errors = {i: result for i, result in enumerate(results) if isinstance(result, BaseException)}
    if errors:
        raise RankFailed(errors)
    return list(results)


def in_threads(
    world_size: int,
    fn: Callable[[hostring.Comm], Any],
    *,
    check: bool = True,
    deadline: float = DEADLINE_S,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(comm)` as `world_size` ranks in threads. Returns results by rank; with `check=False`, exceptions too."""
    kwargs = {"transport": "memory", "timeout": 20.0, "store": MemoryStore(), **kwargs}

    def rank(r: int) -> Any:
        with hostring.init(r, world_size, **kwargs) as comm:
            return fn(comm)

    results = side_by_side([lambda r=r: rank(r) for r in range(world_size)], deadline)
    return successes(results) if check else results


def _process_body(
    answers: Any, rank: int, world_size: int, fn: Callable[..., Any], address: str, kwargs: dict[str, Any]
) -> None:
    os.environ.update(MASTER_ADDR=address.rpartition(":")[0], MASTER_PORT=address.rpartition(":")[2])
    try:
        with hostring.init(rank, world_size, **kwargs) as comm:
            answers.put((rank, "ok", fn(comm)))
    except BaseException as exc:
        answers.put((rank, "error", f"{type(exc).__name__}: {exc}"))


def in_processes(
    world_size: int, fn: Callable[..., Any], *, deadline: float = DEADLINE_S, **kwargs: Any
) -> list[tuple[str, Any]]:
    """Run a module-level `fn(comm)` as spawned processes.

    Returns ("ok", result), ("error", text), ("died", code) or ("hung", None) by rank.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    kwargs = {"timeout": 30.0, **kwargs}
    address = f"127.0.0.1:{free_port()}"
    children = [
        context.Process(target=_process_body, args=(answers, r, world_size, fn, address, kwargs), daemon=True)
        for r in range(world_size)
    ]
    for child in children:
        child.start()
    outcome: dict[int, tuple[str, Any]] = {}
    end = time.monotonic() + deadline
    while len(outcome) < world_size and time.monotonic() < end:
        try:
            rank, kind, value = answers.get(timeout=0.2)
            outcome[rank] = (kind, value)
        except queue.Empty:
            for r, child in enumerate(children):
                if not child.is_alive() and child.exitcode != 0 and r not in outcome:
                    outcome[r] = ("died", child.exitcode)
    for child in children:
        child.join(5)
        if child.is_alive():
            child.kill()
            child.join()
    return [outcome.get(r, ("hung", None)) for r in range(world_size)]


def free_ports(n: int) -> list[int]:
    """Different ports on the loopback interface that nobody listened on a moment ago."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def free_port() -> int:
    return free_ports(1)[0]
