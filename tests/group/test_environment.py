"""What each launcher says in the environment: torchrun, our own, Open MPI, MPICH, SLURM."""

from __future__ import annotations

import itertools
import os

import pytest

from hostring.group import environment as launchers
from hostring.group.config import from_environment
from hostring.group.environment import expand_hosts, launched


def test_torchrun_brings_its_store() -> None:
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    config = from_environment(environ=environ)
    assert from_environment(store="torch's", environ=environ).store_host == "node0", "it tells where to listen"
    assert (config.rank, config.world_size) == (3, 4)
    assert (config.store_host, config.store_port, config.torch_store, config.hosts_store) == (
        "node0",
        29400,
        True,
        False,
    )
    assert config.restarts == "job.2"
    assert not from_environment(environ={**environ, "TORCHELASTIC_USE_AGENT_STORE": "False"}).torch_store


def test_our_launcher_brings_its_store() -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "HOSTRING_STORE": "[::1]:4567",
    }
    config = from_environment(environ=environ)
    assert (config.store_host, config.store_port, config.hosts_store, config.torch_store) == ("::1", 4567, False, False)


def test_open_mpi() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-host-5267@1",
    }
    config = from_environment(environ=environ)
    assert (config.rank, config.world_size, config.store_host) == (1, 2, None)
    assert config.job == from_environment(environ={**environ, "OMPI_COMM_WORLD_RANK": "0"}).job
    assert config.job != from_environment(environ={**environ, "PMIX_NAMESPACE": "prterun-host-5268@1"}).job
    across = from_environment(environ={**environ, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "node7"})
    assert (across.store_host, across.store_port, across.job) == ("node7", 29500, None)


def test_mpich() -> None:
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    config = from_environment(environ=environ)
    assert (config.rank, config.world_size) == (0, 2)
    assert config.job is not None
    with pytest.raises(ValueError, match="MPICH says that this is rank 0 of 4"):
        from_environment(environ={**environ, "PMI_SIZE": "4"})


def test_a_wrapper_between_launcher_and_ranks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = {10: ("bash", 20, "5"), 11: ("python", 20, "6"), 20: ("hydra_pmi_proxy", 30, "3"), 30: ("bash", 1, "1")}
    monkeypatch.setattr(launchers, "_stat", lambda pid: processes[pid])
    found = set()
    for parent in (10, 11, 20):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        found.add(launchers._launcher_process())
    assert found == {"process-20-3"}
    monkeypatch.setattr(os, "getppid", lambda: 30)
    assert launchers._launcher_process() == "process-30-1"


def test_slurm() -> None:
    environ = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "12345",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "4",
        "SLURM_STEP_NODELIST": "gpu[09-11],login2",
    }
    config = from_environment(environ=environ)
    assert (config.rank, config.world_size, config.store_host) == (5, 8, "gpu09")
    assert 61440 <= config.store_port < 65536
    assert config.store_port != from_environment(environ={**environ, "SLURM_STEP_ID": "1"}).store_port
    assert from_environment(environ={**environ, "SLURM_NNODES": "1"}).store_host == "127.0.0.1"
    by_hand = from_environment(environ={**environ, "MASTER_ADDR": "head", "MASTER_PORT": "7000"})
    assert (by_hand.store_host, by_hand.store_port) == ("head", 7000)
    assert launched({**environ, "PMI_RANK": "5", "PMI_SIZE": "8"}) == launched(environ)


def test_the_batch_script_of_slurm_is_not_one_of_its_tasks() -> None:
    environ = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_ID": "1",
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_NODELIST": "a[1-8]",
    }
    assert from_environment(environ=environ).world_size == 1
    assert from_environment(environ={**environ, "SLURM_STEP_ID": "0"}).world_size == 8


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("node1", ["node1"]),
        ("a,b,c", ["a", "b", "c"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-09]x", ["r1n08x", "r1n09x", "r2n08x", "r2n09x"]),
        ("tux[099-101]", ["tux099", "tux100", "tux101"]),
    ],
)
def test_host_lists(names: str, expected: list[str]) -> None:
    assert list(expand_hosts(names)) == expected


def test_a_list_of_hosts_may_be_as_long_as_it_likes() -> None:
    assert list(itertools.islice(expand_hosts("n[0-99999999]"), 2)) == ["n0", "n1"]
    with pytest.raises(ValueError, match="'x-y' in a list of hosts"):
        next(expand_hosts("n[x-y]"))
