"""A command that runs while a test reads what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE = 100.0


class Running:
    """A command whose output is read as it comes. `env` is added to the environment."""

    def __init__(self, *args: str, stdin: int = subprocess.DEVNULL, **env: str) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hostring", *args],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **env},
        )
        self.out, self.err = bytearray(), bytearray()
        self.changed = threading.Condition()
        streams = ((self.process.stdout, self.out), (self.process.stderr, self.err))
        self.readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for reader in self.readers:
            reader.start()

    def _read(self, pipe: Any, into: bytearray) -> None:
        while chunk := os.read(pipe.fileno(), 4096):
            with self.changed:
                into += chunk
                self.changed.notify_all()
        pipe.close()

    def shown(self) -> str:
        return f"--- stdout\n{self.out.decode(errors='replace')}\n--- stderr\n{self.err.decode(errors='replace')}"

    def wait_for(self, what: Callable[[str, str], bool]) -> None:
        """Until `what(stdout, stderr)`."""
        with self.changed:
            left = self.started + DEADLINE - time.monotonic()
            found = self.changed.wait_for(
                lambda: what(self.out.decode(errors="replace"), self.err.decode(errors="replace")), left
            )
        assert found, self.shown()

    def rank(self, rank: int) -> int:
        """The process of a rank of this command, which is its child."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
                    if parent == self.process.pid and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(
                        b"\0"
                    ):
                        return int(entry.name)
                except OSError:
                    continue
        raise AssertionError(f"no process of rank {rank}\n{self.shown()}")

    def end(self) -> int:
        """Wait for the end. Returns the exit code."""
        code = self.process.wait(max(0.1, self.started + DEADLINE - time.monotonic()))
        for reader in self.readers:
            reader.join(5)
        return code

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def stop(self) -> None:
        for pipe in filter(None, [self.process.stdin]):
            pipe.close()
        if self.process.poll() is None:
            self.process.terminate()  # it ends its ranks
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
