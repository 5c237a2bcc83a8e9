"""`hostring serve` as people start it: rank processes, signals, and a rank that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from urllib.request import Request, urlopen

import pytest
from running import Running
from serving_ranks import DEADLINE_S, ask

pytestmark = pytest.mark.faults

NOTICED_S = 2.0  # from the death of a rank to the event that says so, and from Ctrl-C to the end


@pytest.fixture
def server() -> Iterator[Running]:
    found = Running("serve", "--local", "2", "--port", "0", "--dtypes", "f32")
    try:
        found.wait_for(lambda out, err: out.endswith("\n") or found.process.poll() is not None)
        yield found
    finally:
        found.stop()


def url(server: Running) -> str:
    found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", server.out.decode())
    assert found, server.shown()
    return found[1]


def long_stream(server: Running) -> HTTPResponse:
    """An answer that has begun and takes a while."""
    body = {"prompt": "In the beginning", "max_tokens": 480, "stream": True, "ignore_eos": True, "temperature": 0}
    response = urlopen(Request(f"{url(server)}/v1/completions", json.dumps(body).encode()), timeout=DEADLINE_S)
    assert response.readline().startswith(b"data: ")
    assert isinstance(response, HTTPResponse)
    return response


def test_a_killed_rank_breaks_the_stream_off_and_comes_back(server: Running) -> None:
    with long_stream(server) as stream:
        os.kill(server.rank(1), signal.SIGKILL)
        killed = time.monotonic()
        rest = stream.read().decode()
        assert time.monotonic() - killed < NOTICED_S
    *pieces, event, data, _, _ = rest.split("\n")
    assert all(piece.startswith("data: ") for piece in pieces if piece), pieces
    assert event == "event: error"
    assert "rank 1 is lost" in json.loads(data.removeprefix("data: "))["error"]["message"]
    status, why, _ = ask(f"{url(server)}/health")
    assert status == 503, why
    assert "rank 1 is lost" in why["reason"]
    until = time.monotonic() + DEADLINE_S
    while ask(f"{url(server)}/health")[0] != 200:
        assert time.monotonic() < until, server.shown()
        time.sleep(0.1)
    body = {"prompt": "In the beginning", "max_tokens": 8, "temperature": 0}
    status, found, _ = ask(f"{url(server)}/v1/completions", body)
    assert (status, found["choices"][0]["finish_reason"]) == (200, "length")


def test_ctrl_c_ends_all_ranks(server: Running) -> None:
    ranks = [server.rank(0), server.rank(1)]
    with long_stream(server) as stream:
        server.process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert server.end() == 130
        assert time.monotonic() - sent < NOTICED_S
        assert "shutting down" in stream.read().decode()
    for process in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.slow
def test_ranks_of_a_launcher_serve_together() -> None:
    server = Running("launch", "-n", "3", "-m", "hostring", "serve", "--port", "0", "--device", "cpu")
    try:
        server.wait_for(lambda out, err: out.endswith("\n") or server.process.poll() is not None)
        status, found, _ = ask(f"{url(server)}/v1/completions", {"prompt": "In the beginning", "max_tokens": 4})
        assert (status, found["usage"]["completion_tokens"]) == (200, 4)
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 130
    finally:
        server.stop()
