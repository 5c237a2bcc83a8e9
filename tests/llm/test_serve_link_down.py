"""Ranks on two hosts, and the cable between them is pulled. With network namespaces: on Linux, as root."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from cut_networks import can_cut, cut, enter, mend, network
from serving_ranks import ask

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(400)]

URL = "http://127.0.0.1:8000"
NOTICED_S = 6.0  # the 2 s of silence that ranks bear by default, and what a busy machine adds
READY_S = 120.0
SHORT_CUT_S = 4.0
BODY = {"prompt": "In the beginning", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def name() -> Iterator[str]:
    if why := can_cut():
        pytest.skip(why)
    with network() as found:
        yield found


def inside(name: str, body: Callable[[], Any]) -> Any:
    """What `body` returns on the head's host."""
    found: list[Any] = []

    def run() -> None:
        enter(name, culprit=False)
        try:
            found.append(body())
        except BaseException as exc:
            found.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(200)
    assert found, "it hangs"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class Ranks:
    """Rank 0 on host a and rank 1 on host b. `outputs` is what each writes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.outputs = name, [folder / f"rank{rank}" for rank in range(2)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, **env: str) -> subprocess.Popen[bytes]:
        command = ["ip", "netns", "exec", f"{self.name}-{'ab'[rank]}", sys.executable, "-m", "hostring", "serve"]
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "198.18.0.1", "MASTER_PORT": "29566"}
        environment = {**os.environ, **place, "HOSTRING_SECRET": "both know it", **env}
        with self.outputs[rank].open("ab") as file:
            command += ["--device", "cpu"]
            started = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        self.processes.append(started)
        return started

    def shown(self) -> str:
        return "\n".join(output.read_text(encoding="utf-8") for output in self.outputs)

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(20)


@pytest.fixture
def ranks(name: str, tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(name, tmp_path)
    try:
        yield found
    finally:
        found.end()


def until_healthy() -> None:
    until = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(URLError):
            if ask(f"{URL}/health")[0] == 200:
                return
        assert time.monotonic() < until
        time.sleep(0.2)


def cut_off(name: str) -> tuple[float, str, tuple[int, Any]]:
    """Seconds from the cut to the end of a stream, its last lines, and what /health says then."""
    until_healthy()
    request = Request(f"{URL}/v1/completions", json.dumps({**BODY, "stream": True}).encode())
    with urlopen(request, timeout=60) as stream:
        assert stream.readline().startswith(b"data: ")
        cut(name)
        began = time.monotonic()
        rest = stream.read().decode()
        return time.monotonic() - began, rest, ask(f"{URL}/health")[:2]


def cut_for_a_moment(name: str) -> str:
    """All of a stream, during which the cable was out for some seconds."""
    until_healthy()
    request = Request(f"{URL}/v1/completions", json.dumps({**BODY, "stream": True}).encode())
    with urlopen(request, timeout=60) as stream:
        assert stream.readline().startswith(b"data: ")
        cut(name)
        time.sleep(SHORT_CUT_S)
        mend(name)
        return str(stream.read().decode())


def test_a_short_cut_costs_its_time_alone(name: str, ranks: Ranks) -> None:
    for rank in range(2):
        ranks.start(rank, HOSTRING_SILENCE="10")
    text = inside(name, lambda: cut_for_a_moment(name))
    assert "event: error" not in text
    assert text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("mended_after_s", [0.0, 5.0])
def test_a_cut_cable_ends_streams_with_an_error_and_mended_it_serves_again(
    mended_after_s: float, name: str, ranks: Ranks
) -> None:
    """Both ranks go on waiting for each other, and find each other again without a hand."""
    _, worker = ranks.start(0), ranks.start(1)
    seconds, rest, (status, why) = inside(name, lambda: cut_off(name))
    assert "event: error" in rest, rest[-500:]
    assert "rank 1 is lost" in rest
    assert (status, "rank 1 is lost" in why["reason"]) == (503, True)
    assert seconds < NOTICED_S
    time.sleep(mended_after_s)
    mend(name)
    inside(name, until_healthy)
    status, found = inside(name, lambda: ask(f"{URL}/v1/completions", {**BODY, "max_tokens": 8})[:2])
    assert (status, found["usage"]["completion_tokens"]) == (200, 8)
    assert worker.poll() is None
