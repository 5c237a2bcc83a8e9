"""Ranks for tests: threads for the matrix of cases, spawned processes for what a process must do. Nothing here can hang."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

import hostring
from hostring.group.rendezvous import MemoryStore

DEADLINE = 60.0

hypothesis.settings.register_profile("hostring", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile(
    "hostring"
)  # how long an example takes says something of the machine, not of what is tested

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in the background of a script; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


class RankFailed(AssertionError):
    """A rank raised; its traceback is in the message, the exception in `errors`."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        words = ["".join(traceback.format_exception(exc)) for exc in errors.values()]
        super().__init__(f"ranks {sorted(errors)} failed:\n" + "\n".join(words))
        self.errors = errors


def in_threads(world_size: int, fn: Callable[[hostring.Comm], Any], *, check: bool = True, **kwargs: Any) -> list[Any]:
    """Run `fn(comm)` as `world_size` ranks in threads. Returns results by rank; with `check=False`, exceptions as results."""
    kwargs = {"transport": "memory", "timeout": 20.0, "store": MemoryStore(), **kwargs}
    results: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            with hostring.init(rank, world_size, **kwargs) as comm:
                results[rank] = fn(comm)
        except BaseException as exc:
            errors[rank] = exc

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(world_size)]
    for t in threads:
        t.start()
    for rank, t in enumerate(threads):
        t.join(DEADLINE)
        if t.is_alive():
            errors.setdefault(rank, TimeoutError(f"rank {rank} hangs"))
    if not check:
        return [errors.get(r, results[r]) for r in range(world_size)]
    if errors:
        raise RankFailed(errors)
    return results


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`run_ranks(world_size, fn, **init_kwargs)`: ranks as threads, over memory unless `transport=` says otherwise."""
    return in_threads


def _process_body(
    queue: Any, rank: int, world_size: int, fn: Callable[..., Any], address: str, kwargs: dict[str, Any]
) -> None:
    import os

    os.environ.update(MASTER_ADDR=address.rpartition(":")[0], MASTER_PORT=address.rpartition(":")[2])
    try:
        with hostring.init(rank, world_size, **kwargs) as comm:
            queue.put((rank, "ok", fn(comm)))
    except BaseException as exc:
        queue.put((rank, "error", f"{type(exc).__name__}: {exc}"))


def in_processes(
    world_size: int, fn: Callable[..., Any], *, deadline: float = DEADLINE, **kwargs: Any
) -> list[tuple[str, Any]]:
    """Run a module-level `fn(comm)` as spawned processes.

    Returns ("ok", result), ("error", text), ("died", code) or ("hung", None) by rank.
    """
    import socket
    import time

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    kwargs = {"timeout": 30.0, **kwargs}
    children = [
        context.Process(target=_process_body, args=(queue, r, world_size, fn, address, kwargs), daemon=True)
        for r in range(world_size)
    ]
    for child in children:
        child.start()
    outcome: dict[int, tuple[str, Any]] = {}
    end = time.monotonic() + deadline
    while len(outcome) < world_size and time.monotonic() < end:
        try:
            rank, kind, value = queue.get(timeout=0.2)
            outcome[rank] = (kind, value)
        except Exception:
            for r, child in enumerate(children):
                if not child.is_alive() and child.exitcode != 0 and r not in outcome:
                    outcome[r] = ("died", child.exitcode)
    for child in children:
        child.join(5)
        if child.is_alive():
            child.kill()
            child.join()
    return [outcome.get(r, ("hung", None)) for r in range(world_size)]


@pytest.fixture
def run_processes() -> Callable[..., list[tuple[str, Any]]]:
    """`run_processes(world_size, fn, **init_kwargs)`: ranks as spawned processes over TCP."""
    return in_processes
