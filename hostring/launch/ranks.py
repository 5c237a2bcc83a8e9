"""Starts the ranks of one machine: `hostring launch`, the demo and the tests."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from hostring.group.peer_info import usable_cores
from hostring.launch.exits import exit_code, how_it_ended
from hostring.launch.orphans import LAUNCHER
from hostring.launch.restarts import Revival
from hostring.store.server import StoreServer
from hostring.transports.addresses import join_address, listen

log = logging.getLogger("hostring")

GRACE = 5.0
"""Seconds that ranks get to end by themselves after each signal before they get a stronger one."""

LAST_WORDS = 2.0
"""Seconds that ranks get to notice by themselves that another has failed, and to say what they have to say."""


def launch(
    argv: Sequence[str],
    n: int,
    *,
    env: Mapping[str, str] | None = None,
    prefix_output: bool = False,
    grace: float = GRACE,
    last_words: float = LAST_WORDS,
    revival: Revival | None = None,
) -> int:
    """Run a Python program as `n` ranks on this machine, and wait for it.

    This process hosts the store, on loopback, with a secret that only the ranks get (in their environment, never on a
    command line). When a rank fails, the others are ended, unless `revival` wants it started again: then it gets
    HOSTRING_REJOIN=1, and the others are to call `Comm.rebuild`. SIGINT, SIGTERM and SIGHUP go to all ranks, and end the
    ones that don't react.

    Args:
        argv: a script and its arguments, or "-m", a module and its arguments.
        n: world size.
        env: more variables for all ranks.
        prefix_output: put "[rank] " before each line of output. Lines appear whole, so streamed text comes late.
        grace, last_words: see `GRACE` and `LAST_WORDS`.
        revival: which ranks are started again; none when not given.

    Returns:
        0 when all ranks ended well, else the exit code of the first that did not (128 + signal for a killed one).

    Raises:
        ValueError: nothing to run, or no ranks.
    """
    if n < 1:
        raise ValueError(f"n={n}: at least one rank is needed")
    if not argv:
        raise ValueError("argv is empty: give a script, or -m and a module")
    secret = (env or {}).get("HOSTRING_SECRET") or secrets.token_hex(32)
    server = StoreServer([listen("127.0.0.1", 0)], secret.encode())
    ranks = _Ranks(grace, last_words, revival)
    torch_port = _free_port()
    try:
        with ranks.passing_signals_on():
            for rank in range(n):
                environment = _environment(rank, n, server.port, torch_port, secret, env or {})
                if (
                    prefix_output
                ):  # else lines would wait in the ranks' buffers; without pipes of our own it would tear lines apart
                    environment["PYTHONUNBUFFERED"] = "1"
                ranks.start([sys.executable, *argv], environment, rank, prefix_output)
            return ranks.wait()
    finally:
        ranks.end_all()
        server.close()


def _environment(
    rank: int, n: int, port: int, torch_port: int, secret: str, extra: Mapping[str, str]
) -> dict[str, str]:
    """`torch_port` is free: torch's own rendezvous would run there, ours runs at `port`."""
    unwanted = ("RING_CONFIG", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    inherited = {key: value for key, value in os.environ.items() if key not in unwanted}
    threads = max(1, len(usable_cores()) // n)
    return {
        "OMP_NUM_THREADS": str(
            threads
        ),  # else each rank's numpy and torch would start as many threads as there are cores
        **inherited,
        **extra,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(torch_port),
        "HOSTRING_STORE": join_address("127.0.0.1", port),
        "HOSTRING_SECRET": secret,
        LAUNCHER: str(os.getpid()),
    }


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class _Ranks:
    """The processes of one launch."""

    def __init__(self, grace: float, last_words: float, revival: Revival | None) -> None:
        self._grace, self._last_words, self._revival = grace, last_words, revival
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starts: list[tuple[Sequence[str], Mapping[str, str], bool]] = []
        self._printers: list[threading.Thread] = []
        self._printing = threading.Lock()
        self._received: list[int] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str], rank: int, prefix_output: bool) -> None:
        """Start the next rank, in a session of its own: what it starts ends with it."""
        self._starts.append((command, environment, prefix_output))
        self._processes.append(self._start(rank, environment))

    def _start(self, rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command, _, prefix_output = self._starts[rank]
        piped = subprocess.PIPE if prefix_output else None
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=piped,
            stderr=piped,
            start_new_session=True,
        )
        for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                thread = threading.Thread(
                    target=self._print, args=(rank, pipe, target), name=f"hostring-output-{rank}", daemon=True
                )
                thread.start()
                self._printers.append(thread)
        return process

    def wait(self) -> int:
        """Until all have ended. Returns the exit code for the whole."""
        while True:
            codes = [_code(process) for process in self._processes]
            if self._received:
                return self._interrupted()
            if any(codes):
                if not self._revived(codes):
                    return self._failed(codes)
                continue
            for rank in self._revival.stuck() if self._revival is not None else ():
                self._kill(rank)
            if None not in codes:
                return 0
            time.sleep(0.02)

    def _revived(self, codes: Sequence[int | None]) -> bool:
        """Start the failed ranks again. False when one of them is not to be, and nothing more is worth doing."""
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if self._revival is None or not all(
            self._revival.again(rank, how_it_ended(code)) for rank, code in failed.items()
        ):
            return False
        for rank in failed:
            self._kill(rank)
            self._processes[rank].wait()
            self._processes[rank] = self._start(rank, {**self._starts[rank][1], "HOSTRING_REJOIN": "1"})
        return True

    def _failed(self, codes: Sequence[int | None]) -> int:
        culprits = [rank for rank, code in enumerate(codes) if code]
        rank = min(culprits, key=lambda r: (codes[r] or 0) > 0)  # who was killed did not fail because of another
        code = codes[rank] or 0
        others = sum(code is None for code in codes)
        stopping = f"; stopping the {others} that still run" if others else ""
        log.warning(
            "hostring: rank %d (process %d) %s%s", rank, self._processes[rank].pid, how_it_ended(code), stopping
        )
        self._wait_all(self._last_words, lambda: False)
        self.end_all()
        return exit_code(code)

    def _interrupted(self) -> int:
        first = self._received[0]
        self._signal(signal.SIGTERM if first == signal.SIGHUP else first)
        self._wait_all(self._grace, lambda: len(self._received) > 1)
        self.end_all()
        return 128 + first

    def end_all(self) -> None:
        """End what still runs: SIGTERM, then SIGKILL."""
        if any(_code(process) is None for process in self._processes):
            self._signal(signal.SIGTERM)
            self._wait_all(self._grace, lambda: False)
        self._signal(signal.SIGKILL)  # also to what an ended rank left behind in its session
        for process in self._processes:
            process.wait()
        for thread in self._printers:
            thread.join(1.0)

    def _wait_all(self, seconds: float, enough: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not enough() and any(_code(process) is None for process in self._processes):
            time.sleep(0.02)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            _signal(process, number)

    def _kill(self, rank: int) -> None:
        """End a rank, and what it left behind in its session when it has ended."""
        _signal(self._processes[rank], signal.SIGKILL)

    @contextlib.contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Take this process's signals while the ranks run. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def receive(number: int, frame: Any) -> None:
            self._received.append(number)

        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        before = {number: signal.signal(number, receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _print(self, rank: int, pipe: IO[bytes], target: Any) -> None:
        with pipe:
            for line in pipe:
                with self._printing:
                    target.write(f"[{rank}] {line.decode(errors='replace')}" + ("" if line.endswith(b"\n") else "\n"))
                    target.flush()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.returncode is None:  # once it is set, the number may belong to another process
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """How `process` ended, None while it runs. Leaves it unreaped where that is possible, so that its number stays taken."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
