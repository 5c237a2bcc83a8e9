"""Two hosts: network namespaces joined by a cable. Needs root and `ip`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = """
import logging
import numpy as np
import hostring
logging.basicConfig(level=logging.INFO, format="%(message)s")
with hostring.init() as comm:
    x = np.full(3, comm.rank + 1, np.float32)
    comm.all_reduce(x)
    print(f"rank {comm.rank}: {x[0]:.0f}")
"""


class Hosts:
    """Hosts "a" (10.97.0.1) and "b" (10.97.0.2).

    Both know "evo", the name of host a: there it means 127.0.1.1, as on Debian.
    """

    def __init__(self) -> None:
        self.names = {x: f"hostring{os.getpid()}{x}" for x in "ab"}
        self.device = {x: f"hs{os.getpid()}{x}"[-15:] for x in "ab"}

    def up(self) -> None:
        for x, address in (("a", "127.0.1.1"), ("b", "10.97.0.1")):
            folder = Path("/etc/netns", self.names[x])
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} evo\n", encoding="utf-8")
            self.ip("netns", "add", self.names[x])
        ends = [["netns", self.names[x]] for x in "ab"]
        self.ip("link", "add", self.device["a"], *ends[0], "type", "veth", "peer", "name", self.device["b"], *ends[1])
        for x, address in (("a", "10.97.0.1/24"), ("b", "10.97.0.2/24")):
            self.ip("-n", self.names[x], "addr", "add", address, "dev", self.device[x])
            self.ip("-n", self.names[x], "link", "set", "lo", "up")
            self.ip("-n", self.names[x], "link", "set", self.device[x], "up")
        end = time.monotonic() + 10
        while (
            "tentative" in self.ip("-n", self.names["a"], "addr") + self.ip("-n", self.names["b"], "addr")
            and time.monotonic() < end
        ):
            time.sleep(0.1)  # IPv6 looks for a duplicate first

    def down(self) -> None:
        for name in self.names.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                self.ip("netns", "del", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def ip(self, *words: str) -> str:
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20).stdout

    def link_local(self, x: str) -> str:
        return (
            self.ip("-n", self.names[x], "-6", "-o", "addr", "show", "dev", self.device[x], "scope", "link")
            .split()[3]
            .partition("/")[0]
        )

    def run(self, a: dict[str, str], b: dict[str, str], program: str = PROGRAM) -> list[tuple[int, str]]:
        """Run rank 0 on host a and rank 1 on host b. Returns exit code and output of each."""
        running = []
        for rank, (x, extra) in enumerate((("a", a), ("b", b))):
            environment = {
                **os.environ,
                "HOSTRING_TIMEOUT": "60",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_PORT": "29544",
                **extra,
            }
            command = ["ip", "netns", "exec", self.names[x], sys.executable, "-c", program]
            running.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        outcomes = []
        for process in running:
            try:
                out, _ = process.communicate(timeout=100)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            outcomes.append((process.returncode, out))
        return outcomes
