"""The doctor says what is wrong with a way to another host, and measures it where it is right."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from hostring.commands.cli import app
from hostring.commands.doctor import _show
from hostring.launch import doctor as checks
from hostring.launch.doctor import Finding, check_host, check_token
from hostring.launch.link_check import Listener, check_peer
from hostring.launch.token import Token
from hostring.transports import addresses
from hostring.transports.addresses import Interface, choose, is_loopback


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


HOSTS = {
    "one interface": [Interface("lo", "127.0.0.1"), Interface("eth0", "192.0.2.2"), Interface("eth0", "fd00::2")],
    "loopback alone": [Interface("lo", "127.0.0.1"), Interface("lo", "::1")],
    "one tunnel": [Interface("lo", "127.0.0.1"), Interface("tun0", "10.8.0.2")],
    "a tunnel": [Interface("lo", "127.0.0.1"), Interface("eth0", "192.0.2.2"), Interface("tun0", "10.8.0.2")],
    "two tunnels": [Interface("tun0", "10.8.0.2"), Interface("tun0", "fe80::1%tun0"), Interface("tun1", "10.9.0.2")],
    "names that begin alike": [Interface("en", "192.0.2.2"), Interface("en0", "192.0.2.3")],
}


@pytest.mark.parametrize("control", ["cubic", "vegas"])
@pytest.mark.parametrize("world_size", [None, 1, 5])
@pytest.mark.parametrize("there", HOSTS.values(), ids=HOSTS)
def test_advice_can_be_followed_on_this_host_and_is_given_once(
    there: list[Interface], world_size: int | None, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what would leave a host without a way to others, nothing is proposed."""
    files = {"tcp_congestion_control": control, "tcp_available_congestion_control": "reno vegas"}
    files |= {"tcp_rmem": "4096 200000 300000", "tcp_wmem": "4096 100 200"}
    mtu = {
        i.name: "65536" if i.name == "lo" else "1500" if i.name == "eth0" and len(there) == 3 else "1400" for i in there
    }
    read = lambda path: files.get(path.rsplit("/", 1)[-1]) or mtu.get(path.split("/")[-2], "")  # noqa: E731
    monkeypatch.setattr(checks, "interfaces", lambda: there)
    monkeypatch.setattr(checks, "_read", read)
    monkeypatch.setattr(addresses, "interfaces", lambda: there)
    monkeypatch.setattr(checks, "resolve", lambda name: ["127.0.0.1"])
    found = list(check_host(world_size))
    advised = [f.advice for f in found if f.advice]
    assert len(set(advised)) == len(advised)
    assert len({f.what for f in found}) == len(found)
    assert all(bool(f.advice) == (f.verdict != "ok") for f in found)
    for spec in [word for advice in advised for word in advice.split() if word.startswith("HOSTRING_INTERFACE=")]:
        kept = choose(spec.removeprefix("HOSTRING_INTERFACE=").rstrip(","), there)
        assert [i for i in kept if not is_loopback(i.host)], spec
    for advice in advised:
        for address in [word.rstrip(",") for word in advice.split() if word.startswith("MASTER_ADDR=")]:
            assert address.removeprefix("MASTER_ADDR=") in [i.host for i in there if not is_loopback(i.host)]
    text = " ".join(advised)
    assert "tcp_congestion_control=cubic" not in text, "this kernel does not offer it"
    assert ("tcp_congestion_control=reno" in text) == (control == "vegas")
    assert "tcp_rmem='4096 200000 6291456'" in text
    if len({i.name for i in there if not is_loopback(i.host)}) < 2:
        assert "HOSTRING_INTERFACE" not in text


def test_settings_that_can_t_be_changed_here_are_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda path: fixed)
    monkeypatch.setattr(checks, "_read", lambda path: "4096 100 200" if path.endswith("mem") else "vegas")
    assert not [f.advice for f in check_host(1) if "sysctl" in f.advice]


def test_the_same_advice_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    _show([Finding("look", f"interface eth{n}", "10.0.0.1", "do this") for n in range(3)])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "look  interface eth0: 10.0.0.1",
        "      -> do this",
        *[f"look  interface eth{n}: 10.0.0.1" for n in (1, 2)],
    ]
