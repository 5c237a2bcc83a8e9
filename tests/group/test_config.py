from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostring.group import environment as launchers
from hostring.group.config import Config, from_environment
from hostring.group.environment import expand_hosts, launched
from hostring.group.ring_file import read_ring
from hostring.store import job_file
from hostring.transports import addresses
from hostring.transports.addresses import Interface, choose, is_loopback, join_address, split_address

SEED = {  # seed 004, the file of rank 1
    "master_ip": "192.168.77.1",
    "master_port": 9002,
    "port": 9001,
    "right_ip": "192.168.77.1",
    "right_port": 9000,
    "rank": 1,
    "world_size": 2,
}


def ring_file(folder: Path, **changes: Any) -> str:
    content = {**SEED, **changes}
    path = folder / "ring.json"
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
    return str(path)


def chosen(config: Config) -> tuple[object, ...]:
    return config.rank, config.world_size, config.topology, config.order, config.transport, config.timeout


def test_nothing_set_is_a_world_of_one() -> None:
    config = from_environment(environ={})
    assert chosen(config) == (0, 1, "auto", "rank", "auto", 120.0)


def test_arguments_win_over_variables() -> None:
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29501",
        "HOSTRING_TOPOLOGY": "ring",
        "HOSTRING_ORDER": "tree",
        "HOSTRING_TRANSPORT": "tcp",
        "HOSTRING_TIMEOUT": "7.5",
        "HOSTRING_SECRET": "hush",
        "HOSTRING_INTERFACE": "eth1",
    }
    config = from_environment(environ=environ)
    assert chosen(config) == (1, 2, "ring", "tree", "tcp", 7.5)
    assert (config.store_host, config.store_port, config.hosts_store, config.interface) == (
        "10.0.0.1",
        29501,
        True,
        "eth1",
    )
    assert config.secret == b"hush"
    assert "hush" not in repr(config)
    config = from_environment(0, 3, topology="mesh", order="rank", transport="unix", timeout=1, environ=environ)
    assert chosen(config) == (0, 3, "mesh", "rank", "unix", 1.0)
    assert from_environment(topology="auto", environ=environ).topology == "ring"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK='two' is not a number from 0 to 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2' is not a number from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a number from 1 up"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "rank 0 of 2, but nothing says where the ranks meet; set MASTER_ADDR"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "70000"},
            "MASTER_PORT='70000' is not a number from 1",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "[::1"}, r"\[IPv6\]:port"),
        ({"HOSTRING_TIMEOUT": "soon"}, "HOSTRING_TIMEOUT='soon' is not a number of seconds"),
        ({"HOSTRING_TIMEOUT": "0"}, "HOSTRING_TIMEOUT=0.0 is not a positive number"),
        ({"HOSTRING_TIMEOUT": "nan"}, "HOSTRING_TIMEOUT=nan is not a positive number"),
        ({"HOSTRING_TIMEOUT": "inf"}, "HOSTRING_TIMEOUT=inf is not a positive number"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI says that this is rank 0 of 4"),
    ],
)
def test_incomplete_or_ill_formed_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_environment(environ=environ)


def test_half_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="rank=1 and world_size=None: give both"):
        from_environment(1, environ={})
    with pytest.raises(ValueError, match=r"rank=2 is not in 0…1 \(world_size=2\)"):
        from_environment(2, 2, environ={})
    with pytest.raises(ValueError, match="nothing says where the ranks meet"):
        from_environment(0, 2, environ={})
    store = object()
    assert from_environment(1, 2, store=store, environ={}) == Config(rank=1, world_size=2, store=store)


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
    assert (config.rank, config.world_size, config.local_rank) == (3, 4, 1)
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
    assert (config.rank, config.world_size, config.local_rank, config.store_host) == (1, 2, 1, None)
    assert config.job == from_environment(environ={**environ, "OMPI_COMM_WORLD_RANK": "0"}).job
    assert config.job != from_environment(environ={**environ, "PMIX_NAMESPACE": "prterun-host-5268@1"}).job
    across = from_environment(environ={**environ, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "node7"})
    assert (across.store_host, across.store_port, across.job) == ("node7", 29500, None)


def test_mpich() -> None:
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    config = from_environment(environ=environ)
    assert (config.rank, config.world_size, config.local_rank) == (0, 2, 0)
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
    assert (config.rank, config.world_size, config.local_rank, config.store_host) == (5, 8, 1, "gpu09")
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


def test_ring_config_exactly_as_in_the_seed(tmp_path: Path) -> None:
    config = from_environment(environ={"RING_CONFIG": ring_file(tmp_path), "RANK": "0", "WORLD_SIZE": "9"})
    assert (config.rank, config.world_size) == (1, 2)
    assert config.ring is not None
    assert vars(config.ring) == {k: SEED[k] for k in ("master_ip", "master_port", "port", "right_ip", "right_port")}
    master = ring_file(tmp_path, master_ip=None, rank=0)
    assert read_ring(master)[2].master_ip is None
    assert read_ring(ring_file(tmp_path, right_ip="[fe80::1%eth0]"))[2].right_ip == "fe80::1%eth0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"right_ip": ...}, "lacks key right_ip"),
        ({"right_ip": ..., "port": ...}, "lacks keys port, right_ip"),
        (
            {"left_ip": "10.0.0.1"},
            "has the unknown key left_ip; expected a JSON object with the keys master_ip, master_port",
        ),
        ({"port": "9000"}, "port is '9000', expected a whole number from 1 to 65535"),
        ({"port": True}, "port is True"),
        ({"port": 0}, "port is 0"),
        ({"right_port": 65536}, "right_port is 65536"),
        ({"master_port": None}, "master_port is None"),
        ({"master_ip": 5}, "master_ip is 5, expected a host or null"),
        ({"right_ip": None}, "right_ip is None, expected a host"),
        ({"right_ip": " "}, "right_ip is ' '"),
        ({"rank": 2}, "rank is 2, expected a whole number from 0 to 1"),
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 0.0}, "rank is 0.0"),
    ],
)
def test_errors_in_ring_config_name_the_file_and_the_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = ring_file(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        from_environment(environ={"RING_CONFIG": path})
    assert path in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "[" * 100_000, "nan", '{"a":1}'])
def test_ring_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ring.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"RING_CONFIG=.*ring\.json"):
        read_ring(str(path))


def test_ring_config_that_is_not_there_or_contradicts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"RING_CONFIG=.*none\.json"):
        read_ring(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="rank=0 and world_size=2 contradict RING_CONFIG"):
        from_environment(0, 2, environ={"RING_CONFIG": ring_file(tmp_path)})


JSON = st.none() | st.integers() | st.text(max_size=5) | st.floats() | st.lists(st.none())


@given(st.dictionaries(st.sampled_from([*SEED, "extra"]), JSON))
def test_any_ring_config_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(content))
    try:
        rank, world_size, ring = read_ring(str(path))
    except ValueError:
        return
    assert 0 <= rank < world_size
    assert 0 < ring.port < 65536


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:1", ("host", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:29500", ("::1", 29500)),
        ("[fe80::1%eth0]:2", ("fe80::1%eth0", 2)),
        ("fe80::1%eth0", ("fe80::1%eth0", 7)),
        ("::1", ("::1", 7)),
        ("[::1]", ("::1", 7)),
        ("host", ("host", 7)),
    ],
)
def test_addresses_are_read(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text, 7) == expected
    assert split_address(join_address(*expected)) == expected


@pytest.mark.parametrize(
    "text", ["", ":5", "[]:5", "host:", "host:x", "host:0", "host:65536", "[::1]5", "[::1", "host:²"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|names no"):
        split_address(text)


def test_loopback_in_all_its_forms() -> None:
    assert all(
        map(
            is_loopback,
            ["127.0.0.1", "127.0.1.1", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1", "a.localhost"],
        )
    )
    assert not any(map(is_loopback, ["10.0.0.1", "fd00::1", "fe80::1%lo", "myhost", "0.0.0.0"]))
    assert addresses.resolve("localhost") == ["127.0.0.1", "::1"]
    assert addresses.resolve("no-such-host.invalid") == []


HOST = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.0.0.5"),
    Interface("eth1", "192.168.77.1"),
    Interface("eth10", "172.16.0.1"),
    Interface("docker0", "172.17.0.1"),
    Interface("eth0", "fd00::5"),
]


@pytest.mark.parametrize(
    ("spec", "hosts"),
    [
        ("eth1", ["192.168.77.1"]),
        ("eth0", ["10.0.0.5", "fd00::5"]),
        ("eth", ["10.0.0.5", "192.168.77.1", "172.16.0.1", "fd00::5"]),
        ("eth1, eth0", ["192.168.77.1", "10.0.0.5", "fd00::5"]),
        ("^lo,^docker", ["10.0.0.5", "192.168.77.1", "172.16.0.1", "fd00::5"]),
        ("eth,^eth10", ["10.0.0.5", "192.168.77.1", "fd00::5"]),
        ("192.168.0.0/16", ["192.168.77.1"]),
        ("^172.16.0.0/12,^lo", ["10.0.0.5", "192.168.77.1", "fd00::5"]),
        ("fd00::/8", ["fd00::5"]),
        ("^nothing", [i.host for i in HOST]),
    ],
)
def test_interfaces_are_included_and_excluded(spec: str, hosts: list[str]) -> None:
    assert [i.host for i in choose(spec, HOST)] == hosts


@pytest.mark.parametrize(
    ("spec", "message"),
    [("ib0", "'ib0' matches no interface.*eth0"), ("^lo,^eth,^docker", "leaves no"), ("1.2.3.4/99", "not a network")],
)
def test_interface_choices_that_leave_nothing_say_what_is_there(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(spec, HOST)


def test_addresses_to_listen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "interfaces", lambda: HOST)
    assert addresses.hosts_to_bind(loopback=True, spec=None)[0] == "127.0.0.1"
    by_route = addresses.hosts_to_bind(loopback=False, spec=None, first=["192.168.77.1"])
    assert by_route == ["192.168.77.1", "10.0.0.5", "172.16.0.1", "fd00::5", "172.17.0.1"]
    assert addresses.hosts_to_bind(loopback=False, spec=None, first=["127.0.1.1"])[0] == "10.0.0.5"
    assert addresses.hosts_to_bind(loopback=True, spec="eth1") == ["192.168.77.1"]


def test_this_hosts_interfaces_include_loopback() -> None:
    assert "127.0.0.1" in [i.host for i in addresses.interfaces()]


def test_the_meeting_file_is_for_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(LookupError):
        job_file.find("job")
    path = job_file.publish("job", ("127.0.0.1", 5), b"secret")
    assert job_file.find("job") == (("127.0.0.1", 5), b"secret")
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    assert os.listdir(os.path.dirname(path)) == ["job.json"]

    Path(path).write_text("{")
    with pytest.raises(LookupError, match="can't be read"):
        job_file.find("job")
    os.chmod(path, 0o644)
    with pytest.raises(PermissionError, match="must belong to this user alone"):
        job_file.find("job")
    os.unlink(path)
    os.symlink("/dev/null", path)
    with pytest.raises(OSError, match=r"job\.json"):
        job_file.find("job")
    os.chmod(os.path.dirname(path), 0o777)
    with pytest.raises(PermissionError, match="must belong to this user alone"):
        job_file.publish("job", ("127.0.0.1", 5), b"secret")


def test_importing_transports_under_the_bare_name_is_refused() -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", "import transports"], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert "import hostring.transports, not transports" in done.stderr
