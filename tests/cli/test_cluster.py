"""Joining by token: who gets which rank, and who is refused."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostring.errors import HandshakeError, RendezvousError
from hostring.launch.cluster import Cluster, Token, join


@pytest.fixture
def cluster() -> Any:
    opened = Cluster(3, name="evo", hosts=["127.0.0.1"])
    yield opened
    opened.close()


def test_a_token_survives_being_written_down() -> None:
    token = Token((("192.168.77.1", 9002), ("fe80::1%eth0", 9002)), 3, 1_800_000_000, bytes(range(16)))
    assert Token.parse(f"  {token}\n") == token
    assert not set("0OIl") & set(str(token))


@given(st.data())
def test_a_mistyped_token_is_noticed(data: st.DataObject) -> None:
    text = str(Token((("127.0.0.1", 9002),), 3, 1_800_000_000, bytes(range(16))))
    k = data.draw(st.integers(0, len(text) - 1))
    wrong = text[:k] + data.draw(st.characters(codec="utf-8").filter(lambda c: c != text[k])) + text[k + 1 :]
    with pytest.raises(ValueError, match="token"):
        Token.parse(wrong)


@given(st.text(max_size=2000))
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="token"):
        Token.parse(text)


def test_a_token_never_shows_its_secret(cluster: Cluster) -> None:
    assert cluster.token.secret.hex() not in repr(cluster.token)
    assert repr(cluster.token.secret) not in repr(cluster.place)


def test_ranks_are_given_in_the_order_of_joining(cluster: Cluster) -> None:
    token = Token.parse(str(cluster.token))
    assert [join(token, name).rank for name in ("spark", "dbc")] == [1, 2]
    assert cluster.wait() == {0: "evo", 1: "spark", 2: "dbc"}
    with pytest.raises(HandshakeError, match="used up: all 3 ranks have joined"):
        join(token, "late")


def test_a_name_joins_once_but_may_come_back(cluster: Cluster) -> None:
    assert join(cluster.token, "spark").rank == 1
    with pytest.raises(HandshakeError, match="'spark' has joined already"):
        join(cluster.token, "spark")
    back = join(cluster.token, "spark", rejoins=True)
    assert (back.rank, back.environment()["HOSTRING_REJOIN"]) == (1, "1")
    with pytest.raises(HandshakeError, match="no machine called 'dbc'"):
        join(cluster.token, "dbc", rejoins=True)


def test_a_wrong_secret_is_refused(cluster: Cluster) -> None:
    t = cluster.token
    with pytest.raises(HandshakeError, match="does not know this token"):
        join(Token(t.addresses, t.world_size, t.expires, bytes(16)), "spark")


def test_an_expired_token_is_refused_on_both_sides() -> None:
    cluster = Cluster(2, name="evo", hosts=["127.0.0.1"], lifetime=-1)
    try:
        with pytest.raises(RendezvousError, match="missing are ranks 1"):
            cluster.wait()
        with pytest.raises(HandshakeError, match="expired"):
            join(cluster.token, "spark")
        t = cluster.token
        forged = Token(
            t.addresses, t.world_size, int(time.time()) + 60, t.secret
        )  # a clock that is wrong does not help
        with pytest.raises(HandshakeError, match="the token has expired"):
            join(forged, "spark")
    finally:
        cluster.close()


def test_nobody_there_is_an_error_that_says_where() -> None:
    cluster = Cluster(2, name="evo", hosts=["127.0.0.1"])
    cluster.close()
    with pytest.raises(RendezvousError, match=r"nobody answers .*127\.0\.0\.1"):
        join(cluster.token, "spark", timeout=0.5)


def test_progress_names_who_is_missing(cluster: Cluster) -> None:
    seen: list[set[int]] = []

    def arrive() -> None:
        join(cluster.token, "spark")
        while {0, 1} not in seen:
            time.sleep(0.01)
        join(cluster.token, "dbc")

    thread = threading.Thread(target=arrive, daemon=True)
    thread.start()
    cluster.wait(lambda here, left: seen.append(set(here)))
    thread.join(10)
    assert {0, 1} in seen
    assert seen[-1] == {0, 1, 2}


@pytest.mark.faults
def test_two_machines_join_from_the_command_line() -> None:
    def start(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "hostring", "cluster", *args]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    first = start("init", "--ranks", "2", "--host", "127.0.0.1", "--name", "evo")
    second = None
    try:
        assert first.stdout is not None
        token = next(m[1] for line in first.stdout if (m := re.search(r"cluster join (\w+)", line)))
        second = start("join", token, "--name", "spark")
        said = second.communicate(timeout=60)[0]
        assert "joined as rank 1 of 2" in said
        assert second.returncode == 0, said
        shown = first.communicate(timeout=60)[0]
        assert first.returncode == 0, shown
        assert "all 2 ranks are connected" in shown
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
