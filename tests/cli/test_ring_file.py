"""Every mistake in a RING_CONFIG file is one line that names the file, the key, the value and what is accepted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hostring.group.config import from_environment

GOOD: dict[str, Any] = {
    "master_ip": "192.168.77.1",
    "master_port": 9002,
    "port": 9001,
    "right_ip": "192.168.77.1",
    "right_port": 9000,
    "rank": 1,
    "world_size": 2,
}
HOSTS, PORTS, COUNTS = ("master_ip", "right_ip"), ("master_port", "port", "right_port"), ("rank", "world_size")
NO_NUMBER = [None, True, "9000", "", 1.0, [], {}, -1, 10**30, "a\nb"]
NO_HOST = ["", "  ", 5, True, 1.5, [], {"a": 1}, "a:b:c]", "[::1", "[::1]x", "host:port", ":9000", "a b", "x\ny", "::"]
NO_HOST += ["0.0.0.0", "192.168.77.1:0", "192.168.77.1:65536"]
WRONG = [(key, value) for key in (*PORTS, *COUNTS) for value in NO_NUMBER]
WRONG += [(key, value) for key in PORTS for value in (0, 65536)] + [("world_size", 0), ("rank", 2), ("right_ip", None)]
WRONG += [(key, value) for key in HOSTS for value in NO_HOST]


def refused(path: Path) -> str:
    with pytest.raises(ValueError, match="RING_CONFIG=") as error:
        from_environment(environ={"RING_CONFIG": str(path)})
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 400 + len(str(path))
    assert str(path) in text
    assert error.value.__cause__ is None  # one traceback, not two
    assert error.value.__suppress_context__ or error.value.__context__ is None
    return text


@pytest.mark.parametrize(("key", "value"), WRONG, ids=lambda x: repr(x)[:20])
def test_a_wrong_value_is_named_with_what_is_accepted(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "ring.json"
    path.write_text(json.dumps({**GOOD, key: value}), encoding="utf-8")
    text = refused(path)
    assert f"{key} is " in text
    assert "expected a " in text
    if not isinstance(value, dict | str) and value != 10**30:
        assert f"{key} is {value!r}" in text


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_and_a_misspelt_key_are_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "ring.json"
    rest = {k: v for k, v in GOOD.items() if k != key}
    path.write_text(json.dumps(rest), encoding="utf-8")
    assert f"lacks key {key}; expected a JSON object with the keys master_ip" in refused(path)
    path.write_text(json.dumps({**GOOD, f"{key}\n": 1}), encoding="utf-8")
    assert f"unknown key '{key}\\n'" in refused(path)


def test_a_key_that_stands_there_twice_is_no_choice(tmp_path: Path) -> None:
    path = tmp_path / "ring.json"
    path.write_text(json.dumps(GOOD)[:-1] + ', "rank": 0}', encoding="utf-8")
    assert "a key stands there twice" in refused(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b"PK\x03\x04", b"[" * 9999, b" " * 70_000, b'{"a": NaN}'],
    ids=repr,
)
def test_what_is_no_object_says_what_is_expected(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "ring.json"
    path.write_bytes(data)
    assert "expected a JSON object with the keys master_ip, master_port" in refused(path)


def test_a_file_that_can_t_be_read(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.json")
    assert "directory" in refused(tmp_path)


def test_a_rank_can_t_dial_itself(tmp_path: Path) -> None:
    path = tmp_path / "ring.json"
    path.write_text(json.dumps({**GOOD, "right_ip": "127.0.0.1", "right_port": 9001}), encoding="utf-8")
    assert "right_port is 9001, expected on this host a port other than this rank's own" in refused(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "ring.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert from_environment(environ={"RING_CONFIG": str(path)}).rank == 1


@pytest.mark.parametrize("variable", ["HOSTRING_STORE", "MASTER_ADDR"])
def test_an_address_in_a_variable_is_named_by_it(variable: str) -> None:
    with pytest.raises(ValueError, match=rf"{variable}='\[::1': .*expected HOST:PORT"):
        from_environment(environ={"RANK": "0", "WORLD_SIZE": "2", variable: "[::1"})


@pytest.mark.parametrize("program", [["-m", "hostring", "generate"], ["-m", "hostring.commands.cluster"]])
def test_commands_end_without_a_traceback(tmp_path: Path, program: list[str]) -> None:
    environment = {**os.environ, "RING_CONFIG": str(tmp_path / "none.json")}
    done = subprocess.run(
        [sys.executable, *program], env=environment, capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"hostring: RING_CONFIG={tmp_path / 'none.json'}: No such file")
