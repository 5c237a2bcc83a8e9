"""The rank processes of one launch: started, watched, passed signals, and ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hostring.launch.exits import exit_code, how_it_ended
from hostring.launch.output import Output
from hostring.launch.restarts import Revival

log = logging.getLogger("hostring")

_POLL_S = 0.02

Tell = Callable[[dict[int, str]], None]
"""Told how ranks ended well, by rank, while others still run."""


@dataclass
class Rank:
    """One rank: how it is started, and its process."""

    number: int
    command: Sequence[str]
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]

    def returncode(self) -> int | None:
        """How it ended, None while it runs. The process stays unreaped where possible: its number stays taken."""
        process = self.process
        if process.returncode is not None or not hasattr(os, "waitid"):
            return process.poll()
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def signal(self, number: int) -> None:
        """To the rank and all that it started, also to what it left behind when it has ended."""
        if self.process.returncode is None:  # once it is set, the number may belong to another process
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


@dataclass
class Processes:
    """All ranks of one launch.

    Attributes:
        pipes: whether the ranks' stderr passes through this process; stdout does only with a prefix.
        grace, last_words: seconds, see `hostring.launch.ranks.launch`.
    """

    output: Output
    pipes: bool
    prefix: bool
    grace: float
    last_words: float
    revival: Revival | None = None
    tell: Tell = lambda ended: None
    ranks: list[Rank] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    _failures: list[int] = field(default_factory=list)  # ranks, in the order in which they were seen to have failed

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the next rank."""
        number = len(self.ranks)
        self.ranks.append(Rank(number, command, environment, self._popen(number, command, environment)))

    def _popen(self, number: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=None if number == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE if self.prefix else None,
            stderr=subprocess.PIPE if self.pipes or self.prefix else None,
            start_new_session=True,  # what a rank starts ends with it
        )
        for pipe, target, holds in ((process.stdout, sys.stdout, False), (process.stderr, sys.stderr, True)):
            if pipe is not None:
                self.output.follow(number, pipe, target, holds=holds)
        return process

    def wait(self) -> int:
        """Wait until all have ended. Returns the exit code for the whole."""
        well: dict[int, str] = {}
        while True:
            codes = self._look()
            if self.received:
                return self._interrupted()
            if any(codes):
                if not self._revived(codes):
                    return self._failed()
                continue
            for number in self.revival.stuck() if self.revival is not None else ():
                self.ranks[number].signal(signal.SIGKILL)
            if None not in codes:
                return 0
            ended = {number: how_it_ended(code) for number, code in enumerate(codes) if code is not None}
            if ended != well:
                self.tell(ended)
                well = ended
            time.sleep(_POLL_S)

    def _look(self) -> list[int | None]:
        """How each rank ended, None for those that run."""
        self.output.release_late()
        codes = [rank.returncode() for rank in self.ranks]
        self._failures += [number for number, code in enumerate(codes) if code and number not in self._failures]
        return codes

    def _revived(self, codes: Sequence[int | None]) -> bool:
        """Start the failed ranks again. False when one of them is not to be, and nothing more is worth doing."""
        failed = {number: code for number, code in enumerate(codes) if code}
        again = self.revival.again if self.revival is not None else lambda number, how: False
        if not all(again(number, how_it_ended(code)) for number, code in failed.items()):
            return False
        for number in failed:
            rank = self.ranks[number]
            rank.signal(signal.SIGKILL)
            rank.process.wait()
            self.output.release(number)
            rank.process = self._popen(number, rank.command, {**rank.environment, "HOSTRING_REJOIN": "1"})
        self._failures.clear()
        return True

    def _failed(self) -> int:
        """Name the rank that failed first, print its traceback before the others', and end all."""
        until = time.monotonic() + self.last_words
        self._wait_all(until, lambda: self._culprit() is not None)
        if self._culprit() is None and self.output.causes():  # it has printed its traceback, and ends slowly
            self._wait_all(time.monotonic() + self.grace, lambda: self._culprit() is not None)
        number = self._culprit()
        codes = self._look()
        first = self.output.causes() if number is None else [number]
        if number is None:  # all that have ended say that another one failed
            number = self._failures[0]
        code = codes[number] or 0
        others = sum(code is None for code in codes)
        stopping = f"; stopping the {others} that still run" if others else ""
        process = self.ranks[number].process
        log.warning("hostring: rank %d (process %d) %s%s", number, process.pid, how_it_ended(code), stopping)
        for cause in first:
            self.output.release(cause)
        self._wait_all(until)
        self.end_all()
        return exit_code(code)

    def _culprit(self) -> int | None:
        """The rank that failed by itself, None while only ranks have ended that blame another one."""
        killed = [number for number in self._failures if (self.ranks[number].returncode() or 0) < 0]
        if killed:  # it did not fail because of another
            return killed[0]
        return next((n for n in self._failures if not self.output.failed_because_of_another(n)), None)

    def _interrupted(self) -> int:
        first = self.received[0]
        self._signal(signal.SIGTERM if first == signal.SIGHUP else first)
        self._wait_all(time.monotonic() + self.grace, lambda: len(self.received) > 1)
        self.end_all()
        return 128 + first

    def end_all(self) -> None:
        """End what still runs: SIGTERM, then SIGKILL. Then write what is left of their output."""
        if None in self._look():
            self._signal(signal.SIGTERM)
            self._wait_all(time.monotonic() + self.grace)
        self._signal(signal.SIGKILL)  # also to what an ended rank left behind in its session
        for rank in self.ranks:
            rank.process.wait()
        self.output.close()

    def _wait_all(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        while None in self._look() and time.monotonic() < until and not enough():
            time.sleep(_POLL_S)

    def _signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    @contextlib.contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Take this process's signals while the ranks run. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def receive(number: int, frame: Any) -> None:
            self.received.append(number)

        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        before = {number: signal.signal(number, receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
