"""What a server refuses: wrong requests, strangers, and pages of other origins. Nothing of it is a 500."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving_ranks import ask, served

from hostring.integrations.llm.demo.job import BUNDLED, Job
from hostring.integrations.llm.serve.http import guard
from hostring.integrations.llm.serve.options import ServeOptions, read_keys
from hostring.integrations.llm.serve.serving import Serving

MAX_UNREAD = 65_536  # a server that hangs up before it has read more than this may lose its answer to a reset
KEY = {"Authorization": "Bearer sesame"}
MESSAGES = [{"role": "user", "content": "so"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with served(("float32",), api_keys=("sesame", "other"), allow_origins=("https://friend.example",)) as serving:
        yield serving


@pytest.mark.parametrize(
    ("route", "body", "status", "param", "code"),
    [
        ("chat/completions", b"{", 400, None, "invalid_json"),
        ("chat/completions", b"[]", 400, None, "invalid_json"),
        ("chat/completions", b"[" * 100_000, 400, None, "invalid_json"),
        ("chat/completions", {}, 400, "messages", "missing_required_parameter"),
        ("chat/completions", {"messages": []}, 400, "messages", "invalid_type"),
        ("chat/completions", {"messages": [{"role": "pope", "content": ""}]}, 400, "messages[0].role", "invalid_value"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content", "invalid_value"),
        ("chat/completions", {"messages": MESSAGES, "model": "gpt"}, 404, "model", "model_not_found"),
        ("chat/completions", {"messages": MESSAGES, "teperature": 1}, 400, "teperature", "unknown_parameter"),
        ("chat/completions", {"messages": MESSAGES, "temperature": 3}, 400, "temperature", "invalid_value"),
        ("chat/completions", {"messages": MESSAGES, "temperature": "hot"}, 400, "temperature", "invalid_type"),
        ("chat/completions", {"messages": MESSAGES, "n": 0}, 400, "n", "invalid_value"),
        ("chat/completions", {"messages": MESSAGES, "n": True}, 400, "n", "invalid_type"),
        ("chat/completions", {"messages": MESSAGES, "stop": [1]}, 400, "stop", "invalid_type"),
        ("chat/completions", {"messages": MESSAGES, "stop": list("abcde")}, 400, "stop", "array_above_max_length"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs", "invalid_value"),
        ("chat/completions", {"messages": MESSAGES, "logit_bias": {"x": 1}}, 400, "logit_bias", "invalid_value"),
        ("chat/completions", {"messages": MESSAGES, "stream_options": {}}, 400, "stream_options", "invalid_value"),
        ("chat/completions", {"messages": MESSAGES, "functions": []}, 400, "functions", "unsupported_parameter"),
        ("completions", {}, 400, "prompt", "missing_required_parameter"),
        ("completions", {"prompt": ""}, 400, "prompt", "empty_prompt"),
        ("completions", {"prompt": [1, 10**9]}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": "\ud83d"}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": "so " * 600}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": "so", "suffix": "x"}, 400, "suffix", "unsupported_parameter"),
        ("completions", {"prompt": "so", "best_of": 3}, 400, "best_of", "invalid_value"),
    ],
)
def test_a_wrong_request_is_refused_by_name(
    server: Serving, route: str, body: Any, status: int, param: str | None, code: str
) -> None:
    found = ask(f"{server.url}/v1/{route}", body, **KEY)
    error = found[1]["error"]
    assert (found[0], error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_routes_and_models_that_do_not_exist(server: Serving) -> None:
    assert ask(f"{server.url}/v1/nothing", **KEY)[0] == 404
    assert ask(f"{server.url}/v1/completions", **KEY)[0] == 405
    assert ask(f"{server.url}/v1/models/gpt", **KEY)[1]["error"]["code"] == "model_not_found"
    assert ask(f"{server.url}/v1/models/tiny", **KEY)[1]["id"] == "tiny"


def test_a_body_that_is_too_large(server: Serving) -> None:
    status, found, _ = ask(f"{server.url}/v1/completions", b" " * (9 << 20), **KEY)
    assert (status, found["error"]["code"]) == (413, "request_too_large")


def test_keys_are_asked_for_but_not_for_health(server: Serving) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}):
        status, found, answer = ask(f"{server.url}/v1/models", **headers)
        assert (status, found["error"]["code"], answer["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
    assert ask(f"{server.url}/v1/models", Authorization="bearer other")[0] == 200
    assert ask(f"{server.url}/health")[0] == 200
    assert ask(f"{server.url}/metrics")[0] == 401


def test_pages_of_other_origins(server: Serving) -> None:
    url = f"{server.url}/v1/models"
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        assert ask(url, Origin=origin, **KEY)[0] == 403
    status, _, headers = ask(url, Origin="https://friend.example", **KEY)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://friend.example")
    assert "access-control-allow-credentials" not in headers
    status, _, headers = ask(
        url, method="OPTIONS", Origin="https://friend.example", Access_Control_Request_Headers="authorization"
    )
    assert (status, headers["access-control-allow-headers"]) == (204, "authorization")
    assert ask(url, Origin=server.url, **KEY)[0] == 200


def test_a_name_that_is_not_this_servers(server: Serving) -> None:
    for host, status in (("evil.example", 403), ("localhost:1", 200), ("[::1]:1", 200), ("127.0.0.1", 200)):
        assert ask(f"{server.url}/v1/models", Host=host, **KEY)[0] == status, host


def test_metrics_count_what_was_written(server: Serving) -> None:
    def tokens() -> float:
        lines = ask(f"{server.url}/metrics", **KEY)[1].decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("hostring_generated_tokens_total ")))

    before = tokens()
    assert ask(f"{server.url}/v1/completions", {"prompt": "so", "max_tokens": 5, "ignore_eos": True}, **KEY)[0] == 200
    assert tokens() == before + 5


def test_strangers_are_shown_the_door(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Junk, and headers and a body that never come. A request beside them is answered."""
    monkeypatch.setattr(guard, "MAX_ARRIVAL_S", 0.5)
    parts = urlsplit(server.url)
    address = (str(parts.hostname), int(parts.port or 0))
    slow_body = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer sesame\r\n"
    cases = {
        b"": b"",
        b"GET / HT": b"",
        b"\x16\x03\x01\x02junk\r\n\r\n": b"HTTP/1.1 400",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000: b"HTTP/1.1 400",
        f"{slow_body}Content-Length: 9\r\n\r\n{{".encode(): b"HTTP/1.1 408",
    }
    connections = [socket.create_connection(address, timeout=20) for _ in cases]
    for connection, start in zip(connections, cases, strict=True):
        connection.sendall(start)
    assert ask(f"{server.url}/v1/completions", {"prompt": "so", "max_tokens": 2}, **KEY)[0] == 200
    for connection, (start, first) in zip(connections, cases.items(), strict=True):
        answer = b""
        lost = ConnectionResetError if len(start) > MAX_UNREAD else ()
        with connection, contextlib.suppress(lost):
            while piece := connection.recv(4096):
                answer += piece
                if first.endswith(b"408"):
                    break
            assert answer.startswith(first), answer
            assert bool(answer) == bool(first), answer


def options(**changes: Any) -> ServeOptions:
    job = Job(str(BUNDLED), ("float32",), (), 1, 0.0, 0, 1.0, 0, False)
    return ServeOptions(job, **changes)


def test_other_addresses_need_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--api-key-file"):
        options(host="0.0.0.0")
    file = tmp_path / "keys"
    file.write_text("# ours\n\nsesame\n", encoding="utf-8")
    assert options(host="0.0.0.0", api_keys=read_keys(file)).api_keys == ("sesame",)
    file.write_text("# none\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no key"):
        read_keys(file)
    with pytest.raises(FileNotFoundError, match="one key per line"):
        read_keys(tmp_path / "nowhere")


def test_options_travel() -> None:
    found = options(api_keys=("a",), allow_hosts=("b",), streams=3)
    assert ServeOptions.from_json(found.to_json()) == found


def test_a_stream_is_refused_before_it_begins(server: Serving) -> None:
    """With a status, and not with an event in a stream that looks well."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=20)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "", "stream": True}), KEY)
    assert connection.getresponse().status == 400
    connection.close()
