"""Where the settings of a group come from: arguments, RING_CONFIG, variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from settings import chosen

from hostring.group.config import Config, from_environment
from hostring.group.ring_file import read_ring

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
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}), encoding="utf-8")
    return str(path)


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
    path.write_text(text, encoding="utf-8")
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
    path.write_text(json.dumps(content), encoding="utf-8")
    try:
        rank, world_size, ring = read_ring(str(path))
    except ValueError:
        return
    assert 0 <= rank < world_size
    assert 0 < ring.port < 65536
