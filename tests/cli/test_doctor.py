"""The doctor says what is wrong with a way to another host, and measures it where it is right."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from hostring.commands.cli import app
from hostring.launch.cluster import Token
from hostring.launch.doctor import Finding, Listener, check_host, check_peer, check_token


@pytest.fixture
def listener() -> Iterator[Listener]:
    opened = Listener("127.0.0.1", 0)
    yield opened
    opened.close()


def by_what(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {f.what: f for f in findings}


def test_this_host_has_loopback_and_cores() -> None:
    found = list(check_host(1))
    assert any(f.what == "interface lo" and "127.0.0.1" in f.found for f in found)
    assert {f.what: f for f in found}["cores"].verdict == "ok"


def test_more_ranks_than_cores_is_worth_a_look() -> None:
    assert by_what(check_host(100_000))["cores"].verdict == "look"


def test_a_link_is_measured_in_both_directions(listener: Listener) -> None:
    for _ in range(2):  # it answers one after the other
        found = by_what(check_peer("127.0.0.1", listener.port, "b"))
        assert {f.verdict for f in found.values()} <= {"ok", "look"}
        assert "median" in found["b: round trip"].found
        assert "Gbit/s there" in found["b: bandwidth"].found
        assert found["b: clock"].verdict == "ok"


def test_nobody_listening_and_a_wrong_name_are_told_apart() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    refused = by_what(check_peer("127.0.0.1", port, "b"))[f"b: port {port}"]
    assert refused.verdict == "bad"
    assert f"doctor --listen {port}" in refused.advice
    unknown = by_what(check_peer("no-such-host.invalid", 1, "b"))["b: name"]
    assert unknown.verdict == "bad"


def test_another_service_is_recognised() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        import threading

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        found = by_what(check_peer("127.0.0.1", server.getsockname()[1], "b"))
        thread.join(5)
    assert found["b: service"].verdict == "bad"


def test_an_expired_token_is_bad() -> None:
    def token(expires: float) -> Token:
        return Token((("127.0.0.1", 9000),), 2, int(expires), bytes(16))

    assert check_token(token(time.time() - 5)).verdict == "bad"
    assert check_token(token(time.time() + 50)).verdict == "ok"


def test_the_command_fails_when_something_will_not_work(listener: Listener) -> None:
    good = CliRunner().invoke(app, ["doctor", "--peer", f"127.0.0.1:{listener.port}", "--ranks", "1"])
    assert good.exit_code == 0, good.output
    assert "round trip" in good.output
    bad = CliRunner().invoke(app, ["doctor", "--peer", "no-such-host.invalid:1"])
    assert bad.exit_code == 1
