"""Ranks on two hosts find each other by an address, a name, an interface, a store of torch, or RING_CONFIG."""

from __future__ import annotations

import json
from pathlib import Path

from two_hosts import Hosts

THROUGH_A_TORCH_STORE = """
import datetime, os
import torch
import torch.distributed as dist
rank, soon = int(os.environ.pop("RANK")), datetime.timedelta(seconds=60)
for name in ("WORLD_SIZE", "MASTER_PORT"):
    os.environ.pop(name)
store = dist.TCPStore("10.97.0.1", 29545, 2, rank == 0, timeout=soon, wait_for_workers=False)
dist.init_process_group("hostring", store=store, rank=rank, world_size=2, timeout=soon)
x = torch.full((3,), rank + 1.0)
dist.all_reduce(x)
print(f"rank {rank}: {x[0]:.0f}")
dist.barrier()
"""


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
        path.write_text(json.dumps(content), encoding="utf-8")
    envs = [{"RING_CONFIG": str(path), "HOSTRING_SECRET": "shared"} for path in paths]
    assert "rank 1 reaches rank 0 at 10.97.0.1:9000" in assert_summed(hosts.run(envs[0], envs[1]))
