"""What stops a start: ranks that are late or never come, settings that differ, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from forming import CONTRACT, close_all, configs, everyone, form, hosted, left_behind, talk
from ranks import free_port, side_by_side

from hostring.errors import HandshakeError, RendezvousError
from hostring.group.config import Config
from hostring.group.group import Group, connect

pytestmark = pytest.mark.usefixtures("own_folder")


def test_a_late_rank_is_waited_for_and_named_once_per_host(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostring.group.waiting.FIRST_LINE_S", 0.4)
    monkeypatch.setattr("hostring.group.waiting.MORE_LINES_S", 0.5)
    four = configs(4)

    def late() -> Group:
        time.sleep(2.5)
        return connect(four[3], neighbours=everyone, contract=CONTRACT)

    jobs = [lambda c=c: connect(c, neighbours=everyone, contract=CONTRACT) for c in four[:3]]
    groups = side_by_side([*jobs, late])
    talk(groups)
    close_all(groups)
    lines = [r.getMessage() for r in caplog.records if "waits for rank 3 (" in r.getMessage()]
    assert "hostring: rank 0 waits for rank 3 (3 of 4 here, " in lines[-1]
    assert "s of 20 s)" in lines[-1]
    assert not [line for line in lines if "rank 0" not in line][2:], "the lowest rank of a host speaks for the others"


def test_a_rank_that_never_comes_is_named_at_the_deadline() -> None:
    started = time.monotonic()
    close_all(form(hosted(2)))  # what a process opens once stays open
    before = left_behind()
    outcomes = form([replace(c, timeout=0.8) for c in hosted(3)[:2]])
    assert time.monotonic() - started < 6.0
    for outcome in outcomes:
        assert isinstance(outcome, RendezvousError)
        assert "waited in vain for rank 2" in str(outcome)
    assert left_behind() == before


def test_a_store_that_never_comes_is_reported_at_the_deadline() -> None:
    started = time.monotonic()
    outcome = form([replace(hosted(2)[1], timeout=0.5)])[0]
    assert isinstance(outcome, RendezvousError)
    assert "could not reach the store in time; is rank 0 up, and MASTER_ADDR an address of its host?" in str(outcome)
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("make", [configs, hosted], ids=["given store", "hosted store"])
@pytest.mark.parametrize("odd", [0, 2])
def test_contracts_that_differ_are_reported_on_every_rank(make: Callable[[int], list[Config]], odd: int) -> None:
    close_all(form(hosted(2)))  # what a process opens once stays open
    before = left_behind()
    contracts = [{"order": "tree" if r == odd else "rank"} for r in range(3)]
    outcomes = form(make(3), contracts=contracts)
    for r, outcome in enumerate(outcomes):
        assert isinstance(outcome, HandshakeError), outcome
        assert f"rank {r} has order={contracts[r]['order']!r}" in str(outcome)
        assert "order='tree'" in str(outcome)
        assert "order='rank'" in str(outcome)
    assert left_behind() == before


def test_world_sizes_that_differ_are_reported_on_every_rank() -> None:
    two = hosted(2)
    started = time.monotonic()
    outcomes = form([two[0], replace(two[1], world_size=3)])
    assert time.monotonic() - started < 10.0
    for outcome in outcomes:
        assert isinstance(outcome, HandshakeError)
        assert "world_size differs" in str(outcome)


def test_transports_that_differ_are_reported() -> None:
    two = configs(2)
    outcomes = form([two[0], replace(two[1], transport="unix")])
    for outcome in outcomes:
        assert isinstance(outcome, HandshakeError)
        assert "transport differs" in str(outcome)


def test_configurations_that_make_no_sense_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(ValueError, match="transport='carrier pigeon' is none of"):
        connect(Config(transport="carrier pigeon"), neighbours=everyone, contract=CONTRACT)
    with pytest.raises(ValueError, match="rank 3 is not in 0…2"):
        connect(Config(rank=3, world_size=3), neighbours=everyone, contract=CONTRACT)
    with pytest.raises(ValueError, match="nothing says where the ranks meet"):
        connect(Config(rank=0, world_size=3), neighbours=everyone, contract=CONTRACT)


def test_a_contract_too_large_for_a_hello_is_refused_at_once() -> None:
    started = time.monotonic()
    outcomes = form(configs(2), contracts=[{"order": "x" * 5000}] * 2)
    assert [type(outcome) for outcome in outcomes] == [ValueError, ValueError]
    assert "over the limit of 1024" in str(outcomes[0])
    assert time.monotonic() - started < 5.0


ALONE = """
import logging, sys
from hostring.group.group import connect
from hostring.group.config import from_environment
logging.getLogger("hostring").setLevel(logging.ERROR)
print("up", flush=True)
connect(from_environment(), neighbours=lambda rank, n: set(), contract={})
"""


@pytest.mark.faults
@pytest.mark.parametrize("where", ["rank 0 in the store", "rank 1 without a store", "ring"])
def test_ctrl_c_ends_every_wait_of_the_start(where: str, tmp_path: Path) -> None:
    env = {
        "RANK": "1" if "1" in where else "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    if where == "ring":
        path = tmp_path / "ring.json"
        keys = {
            "master_ip": None,
            "master_port": 9002,
            "port": free_port(),
            "right_ip": "127.0.0.1",
            "right_port": free_port(),
        }
        path.write_text(json.dumps({**keys, "rank": 1, "world_size": 3}), encoding="utf-8")
        env = {"RING_CONFIG": str(path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = subprocess.Popen([sys.executable, "-c", ALONE], env={**os.environ, **env}, text=True, **pipes)
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n"
    time.sleep(1.0)
    running.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = running.communicate(timeout=30)
    assert time.monotonic() - started < 6.0
    assert any(line.startswith("KeyboardInterrupt") for line in err.splitlines()), err
