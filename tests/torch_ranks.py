"""Ranks for torch tests: worker processes that import torch once, and form a fresh process group for each test."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 90.0


class Group:
    """What a test function gets besides its arguments."""

    def __init__(self, rank: int, world_size: int, backend: str, folder: str) -> None:
        self.rank, self.world_size, self.backend, self.folder = rank, world_size, backend, folder


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            fn, group, args, kwargs, env = pipe.recv()
        except EOFError:
            return
        try:
            place = {"RANK": str(group.rank), "LOCAL_RANK": str(group.rank), "WORLD_SIZE": str(group.world_size)}
            with _environment({**place, **env}):
                pipe.send(("ok", _one(fn, group, args, kwargs)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


@contextlib.contextmanager
def _environment(env: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _one(fn: Callable[..., Any], group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(1234)
    seconds = kwargs.pop("seconds", 60.0)
    dist.init_process_group(
        group.backend,
        store=dist.FileStore(os.path.join(group.folder, "store"), group.world_size),
        rank=group.rank,
        world_size=group.world_size,
        timeout=datetime.timedelta(seconds=seconds),
        pg_options=kwargs.pop("pg_options", None),
    )
    try:
        return fn(group, *args, **kwargs)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Pool:
    """Workers. They start when first needed, and again when a test has left them in an unknown state.

    One time in ten, torch 2.13's gloo ends its process when a group is destroyed ("Resource deadlock avoided": a thread
    joins itself), also after it has answered. So a death under gloo, or right after it, does not fail a test.
    """

    def __init__(self) -> None:
        self._gloo_was_here = False
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        atexit.register(self.stop)

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        backend: str = "hostring",
        env: Any = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run the module-level `fn(group, *args, **kwargs)` on every rank. Returns the results by rank.

        Args:
            backend: of the default process group, which exists while `fn` runs.
            env: a dict of variables that are set meanwhile.
            kwargs: besides those for `fn`: `seconds`, the group's timeout; `pg_options`.
        """
        for _ in range(4):
            excused, self._gloo_was_here = self._gloo_was_here or backend == "gloo", backend == "gloo"
            outcome = self._once(world_size, (fn, backend, args, kwargs, env))
            bad = {rank: words for rank, (kind, words) in enumerate(outcome) if kind != "ok"}
            if not bad:
                break
            self.stop()
            if not excused or all(kind != "died" for kind, _ in outcome):
                break
        if bad:
            raise AssertionError("\n".join(f"rank {rank}: {words}" for rank, words in bad.items()))
        return [value for _, value in outcome]

    def _once(self, world_size: int, what: tuple[Any, ...]) -> list[tuple[str, Any]]:
        fn, backend, args, kwargs, env = what
        self._grow(world_size)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                with contextlib.suppress(ConnectionError):  # it has died since its last answer: `_collect` will see
                    self._workers[rank][1].send(
                        (fn, Group(rank, world_size, backend, folder), args, dict(kwargs), env or {})
                    )
            return self._collect(world_size)

    def _grow(self, world_size: int) -> None:
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            worker = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append((worker, ours))

    def _collect(self, world_size: int) -> list[tuple[str, Any]]:
        end = time.monotonic() + DEADLINE_S
        outcome: list[tuple[str, Any]] = []
        for rank in range(world_size):
            worker, pipe = self._workers[rank]
            if not pipe.poll(max(0.0, end - time.monotonic())):
                outcome.append(("hung", f"no answer within {DEADLINE_S} s"))
                continue
            try:
                outcome.append(pipe.recv())
            except (EOFError, ConnectionError):
                worker.join(5)
                outcome.append(("died", f"exit code {worker.exitcode}"))
            if outcome[-1][0] != "ok":
                end = min(end, time.monotonic() + 15)
        return outcome

    def stop(self) -> None:
        """End the workers."""
        workers, self._workers = self._workers, []
        for worker, pipe in workers:
            pipe.close()
            worker.kill()
        for worker, _ in workers:
            worker.join(10)


pool = Pool()
