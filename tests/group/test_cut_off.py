"""A host whose own network is gone says so, and doesn't blame the others. Needs root and `ip`; skipped elsewhere."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

PROGRAM = """
import sys
import numpy as np
import hostring
comm = hostring.init()
x = np.ones(3, np.float32)
comm.all_reduce(x)
print("ready", flush=True)
sys.stdin.readline()
try:
    comm.all_reduce(x, timeout=2.0)
    print("done")
except hostring.HostringError as exc:
    print(f"{type(exc).__name__} {exc.rank}: {exc}", flush=True)
import os
os._exit(0)
"""


class Bridge:
    """Hosts 10.98.0.1 … 10.98.0.N on one switch."""

    def __init__(self, n_hosts: int) -> None:
        self.names = [f"hrcut{os.getpid()}x{k}" for k in range(n_hosts + 1)]  # the last is the switch

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)

    def up(self) -> None:
        switch = self.names[-1]
        for name in self.names:
            self.ip("netns", "add", name)
            self.ip("-n", name, "link", "set", "lo", "up")
        self.ip("-n", switch, "link", "add", "br0", "type", "bridge")
        self.ip("-n", switch, "link", "set", "br0", "up")
        for k, name in enumerate(self.names[:-1]):
            self.ip("link", "add", "net0", "netns", name, "type", "veth", "peer", "name", f"p{k}", "netns", switch)
            self.ip("-n", switch, "link", "set", f"p{k}", "master", "br0", "up")
            self.ip("-n", name, "addr", "add", f"10.98.0.{k + 1}/24", "dev", "net0")
            self.ip("-n", name, "link", "set", "net0", "up")

    def down(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.SubprocessError):
                self.ip("netns", "del", name)

    def start(self, rank: int) -> subprocess.Popen[str]:
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.names) - 1),
            "MASTER_ADDR": "10.98.0.1",
            "MASTER_PORT": "29546",
            "HOSTRING_SECRET": "shared",
            "HOSTRING_TIMEOUT": "20",
        }
        command = ["ip", "netns", "exec", self.names[rank], sys.executable, "-c", PROGRAM]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


@contextlib.contextmanager
def bridge(n_hosts: int) -> Iterator[Bridge]:
    made = Bridge(n_hosts)
    try:
        try:
            made.up()
        except (OSError, subprocess.SubprocessError) as exc:
            pytest.skip(f"no network namespaces here: {exc}")
        yield made
    finally:
        made.down()


def said_after(hosts: Bridge, cut: tuple[str, ...]) -> list[str]:
    """What each rank says of the call after the network was cut."""
    ranks = [hosts.start(r) for r in range(len(hosts.names) - 1)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            assert line == "ready\n", line + rank.communicate(timeout=30)[0]
        hosts.ip(*cut)
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        return [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("n_hosts", [2, 3])
def test_a_host_whose_interface_is_down_says_so(n_hosts: int) -> None:
    with bridge(n_hosts) as hosts:
        last = n_hosts - 1
        said = said_after(hosts, ("-n", hosts.names[last], "link", "set", "net0", "down"))
    assert f"OperationTimeout {last}: " in said[last], said
    assert f"rank {last} itself is cut off: its address 10.98.0.{last + 1} is on no interface that is up" in said[last]
    for text in said[:last]:
        assert f" {last}: " in text, said
        assert "cut off" not in text


def test_a_host_that_no_other_host_answers_says_so() -> None:
    """Its interface is up; the cable is pulled at the switch, where it can't see it."""
    with bridge(3) as hosts:
        said = said_after(hosts, ("-n", hosts.names[-1], "link", "set", "p2", "nomaster"))
    assert "OperationTimeout 2: " in said[2], said
    assert "rank 2 itself is cut off: no other host answers" in said[2]
    for text in said[:2]:
        assert " 2: " in text, said
        assert "cut off" not in text
