"""Two hosts: network namespaces joined by a cable. Needs root and `ip`; skipped elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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

THROUGH_A_TORCH_STORE = """
import datetime, os
import torch
import torch.distributed as dist
rank, soon = int(os.environ.pop("RANK")), datetime.timedelta(seconds=20)
for name in ("WORLD_SIZE", "MASTER_PORT"):
    os.environ.pop(name)
store = dist.TCPStore("10.97.0.1", 29545, 2, rank == 0, timeout=soon, wait_for_workers=False)
dist.init_process_group("hostring", store=store, rank=rank, world_size=2, timeout=soon)
x = torch.full((3,), rank + 1.0)
dist.all_reduce(x)
print(f"rank {rank}: {x[0]:.0f}")
dist.barrier()
"""


class Hosts:
    """Hosts "a" (10.97.0.1) and "b" (10.97.0.2). Both know "evo", the name of host a: there it means 127.0.1.1, as on Debian."""

    def __init__(self) -> None:
        self.names = {x: f"hostring{os.getpid()}{x}" for x in "ab"}
        self.device = {x: f"hs{os.getpid()}{x}"[-15:] for x in "ab"}

    def up(self) -> None:
        for x, address in (("a", "127.0.1.1"), ("b", "10.97.0.1")):
            folder = Path("/etc/netns", self.names[x])
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} evo\n")
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
                "HOSTRING_TIMEOUT": "20",
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
                out, _ = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            outcomes.append((process.returncode, out))
        return outcomes


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.up()
    except (OSError, subprocess.SubprocessError) as exc:
        made.down()
        pytest.skip(f"no network namespaces here: {exc}")
    yield made
    made.down()


def assert_summed(outcomes: list[tuple[int, str]]) -> str:
    for rank, (code, out) in enumerate(outcomes):
        assert code == 0, out
        assert f"rank {rank}: 3" in out
    return outcomes[0][1] + outcomes[1][1]


def test_an_address_of_the_first_host(hosts: Hosts) -> None:
    env = {"MASTER_ADDR": "10.97.0.1", "HOSTRING_SECRET": "shared"}
    out = assert_summed(hosts.run(env, env))
    assert "rank 1 reaches rank 0 at 10.97.0.1:" in out
    assert "without a secret" not in out


def test_a_name_that_means_loopback_on_its_own_host(hosts: Hosts) -> None:
    out = assert_summed(hosts.run({"MASTER_ADDR": "evo"}, {"MASTER_ADDR": "evo"}))
    assert "rank 1 reaches rank 0 at 10.97.0.1:" in out
    assert out.count("without a secret") == 1


def test_link_local_addresses_with_their_scope(hosts: Hosts) -> None:
    host = hosts.link_local("a")
    ends = [{"MASTER_ADDR": f"{host}%{hosts.device[x]}", "HOSTRING_SECRET": "shared"} for x in "ab"]
    out = assert_summed(hosts.run(ends[0], ends[1]))
    assert f"rank 1 reaches rank 0 at [{host}%{hosts.device['b']}]:" in out


def test_an_interface_that_is_chosen(hosts: Hosts) -> None:
    env = {
        "MASTER_ADDR": f"[{hosts.link_local('a')}%",
        "HOSTRING_SECRET": "shared",
        "HOSTRING_INTERFACE": "10.97.0.0/16",
    }
    ends = [{**env, "MASTER_ADDR": f"{env['MASTER_ADDR']}{hosts.device[x]}]"} for x in "ab"]
    assert "rank 1 reaches rank 0 at 10.97.0.1:" in assert_summed(hosts.run(ends[0], ends[1]))


def test_a_store_of_torch_at_an_address_of_the_first_host(hosts: Hosts) -> None:
    env = {"HOSTRING_SECRET": "shared"}
    assert_summed(hosts.run(env, env, THROUGH_A_TORCH_STORE))


def test_loopback_does_not_lead_to_another_host(hosts: Hosts) -> None:
    env = {"MASTER_ADDR": "localhost", "HOSTRING_TIMEOUT": "2"}
    first, second = hosts.run(env, env)
    assert (first[0], second[0]) == (1, 1)
    assert "rank 0 waited in vain for rank 1" in first[1]
    assert "could not reach the store in time; is rank 0 up, and MASTER_ADDR an address of its host?" in second[1]


def test_ring_config_as_in_the_seed(hosts: Hosts, tmp_path: Path) -> None:
    common = {"master_port": 9002, "world_size": 2}
    ends = [
        {"master_ip": None, "port": 9000, "right_ip": "10.97.0.2", "right_port": 9001, "rank": 0, **common},
        {"master_ip": "10.97.0.1", "port": 9001, "right_ip": "10.97.0.1", "right_port": 9000, "rank": 1, **common},
    ]
    paths = [tmp_path / f"ring{rank}.json" for rank in (0, 1)]
    for path, content in zip(paths, ends, strict=True):
        path.write_text(json.dumps(content))
    envs = [{"RING_CONFIG": str(path), "HOSTRING_SECRET": "shared"} for path in paths]
    assert "rank 1 reaches rank 0 at 10.97.0.1:9000" in assert_summed(hosts.run(envs[0], envs[1]))
