"""A `hostring serve` that a benchmark starts, and what its processes take: memory, descriptors and threads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

START_WAIT_S = 180.0
END_WAIT_S = 20.0


@dataclass(frozen=True)
class Taken:
    """What the rank processes hold together."""

    rss_bytes: int
    descriptors: int
    threads: int
    kv_bytes: float


class Server:
    """`hostring serve` with these arguments, until the end of the block."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "hostring", "serve", *args, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
        self.url = ""

    def __enter__(self) -> Server:
        late = threading.Timer(START_WAIT_S, self.process.terminate)
        late.start()
        try:
            assert self.process.stdout is not None
            found = re.fullmatch(r"listening on (\S+)\n", self.process.stdout.readline())
        finally:
            late.cancel()
        if found is None:
            self.__exit__()
            raise SystemExit(f"the server did not start: exit code {self.process.returncode}")
        self.url = found[1]
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()  # it ends its ranks
        try:
            self.process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def state(self, path: str) -> Any:
        """`/health` or `/cluster`."""
        try:
            with urlopen(self.url + path, timeout=30) as response:
                return json.loads(response.read())
        except HTTPError as exc:
            return json.loads(exc.read())

    def metrics(self) -> dict[str, float]:
        """What `/metrics` tells, by the name with its labels."""
        with urlopen(self.url + "/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    def until_idle(self, wait_s: float = 10.0) -> bool:
        """Whether no text runs or waits any more, at most so long from now."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            health = self.state("/health")
            if health.get("running") == 0 and health.get("waiting") == 0:
                return True
            time.sleep(0.05)
        return False

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of a rank."""
        for process in _children(self.process.pid):
            with contextlib.suppress(OSError):  # it has ended
                if f"RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), number)

    def taken(self) -> Taken:
        rss = descriptors = threads = 0
        for process in _children(self.process.pid):
            with contextlib.suppress(OSError, KeyError):  # it has just been killed
                status = dict(
                    line.split(":", 1)
                    for line in (process / "status").read_text(encoding="utf-8").splitlines()
                    if ":" in line
                )
                rss += int(status["VmRSS"].split()[0]) * 1024
                threads += int(status["Threads"])
                descriptors += len(os.listdir(process / "fd"))
        kv = sum(value for name, value in self.metrics().items() if "held_bytes" in name and 'of="kv"' in name)
        return Taken(rss, descriptors, threads, kv)


def _children(pid: int) -> list[Path]:
    """Of a process, in /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]) == pid:
                    found.append(entry)
            except OSError:  # it has ended
                continue
    return found
