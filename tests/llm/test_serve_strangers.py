"""100 strangers at the port of a server that writes a text: all are refused, and the text loses no step."""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from serving_ranks import ask, served

from hostring.integrations.llm.serve.http import app, guard
from hostring.integrations.llm.serve.serving import Serving

KEY = {"Authorization": "Bearer sesame"}
TOKENS = 400
BODY = {"prompt": "In the beginning", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
OF_EACH_KIND = 20
MAX_BODY_BYTES = 64 << 10  # here: 20 bodies of more than 8 MiB would take longer than the text


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with served(("float32",) * 2, api_keys=("sesame",), streams=2) as serving:
        yield serving


def post(host: str, length: int, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {host}", f"Content-Length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def slow(host: str) -> bytes:
    """Headers that never end."""
    return f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nX-Slow: ".encode()


def junk(host: str) -> bytes:
    return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no HTTP\r\n\r\n"


def huge(host: str) -> bytes:
    """With the right key, more than any body may have."""
    return post(host, 3 * MAX_BODY_BYTES, "Authorization: Bearer sesame") + b" " * (3 * MAX_BODY_BYTES)


def wrong_key(host: str) -> bytes:
    body = json.dumps(BODY).encode()
    return post(host, len(body), "Authorization: Bearer open") + body


def foreign(host: str) -> bytes:
    """A web page of another site, in the browser of somebody who has a key."""
    body = json.dumps(BODY).encode()
    return post(host, len(body), "Authorization: Bearer sesame", "Origin: https://elsewhere.example") + body


KINDS: dict[Callable[[str], bytes], bytes] = {slow: b"", junk: b"400", huge: b"413", wrong_key: b"401", foreign: b"403"}
"""With the status that each gets; without one, the connection is closed."""


def say(connection: socket.socket, words: bytes) -> None:
    """As much as the server takes: it may answer and close before all has come."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(words)


def status(connection: socket.socket) -> bytes:
    """Of the answer, empty without one."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            answer += piece
            if answer.count(b"\r\n"):
                break
    return answer[9:12]


def test_100_strangers_are_refused_and_a_text_loses_no_step(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of the text is a step of its own, and there is no step that computes anything else."""
    monkeypatch.setattr(guard, "MAX_ARRIVAL_S", 1.0)
    monkeypatch.setattr(app, "MAX_BODY_BYTES", MAX_BODY_BYTES)
    status_alone, alone, _ = ask(f"{server.url}/v1/completions", BODY, **KEY)
    assert status_alone == 200
    steps, ended = server.scheduler.totals.steps, dict(server.scheduler.totals.ended)
    host = urlsplit(server.url).netloc
    address = (urlsplit(server.url).hostname, urlsplit(server.url).port)
    request = Request(f"{server.url}/v1/completions", json.dumps({**BODY, "stream": True}).encode(), KEY)
    with contextlib.ExitStack() as stack, urlopen(request, timeout=60) as stream:
        lines = [stream.readline()]
        strangers = []
        for kind in list(KINDS) * OF_EACH_KIND:
            strangers.append((kind, stack.enter_context(socket.create_connection(address, timeout=60))))
            say(strangers[-1][1], kind(host))
        assert server.scheduler.in_flight == (1, 0), "the text was complete before all strangers were there"
        found = Counter((kind, status(connection)) for kind, connection in strangers)
        lines += list(stream)
    assert found == dict.fromkeys(KINDS.items(), OF_EACH_KIND)
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone["choices"][0]["text"]
    assert lines[-2:] == [b"data: [DONE]\n", b"\n"]
    assert server.scheduler.totals.steps - steps == TOKENS  # the prompt's last token, and all but the last of the text
    assert server.scheduler.totals.ended == {**ended, "complete": ended["complete"] + 1}
