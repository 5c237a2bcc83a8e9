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
from hostring.launch import claims
from hostring.launch import cluster as opening
from hostring.launch.cluster import Cluster
from hostring.launch.joining import join, wait_for_all
from hostring.launch.token import Token
from hostring.transports import addresses, tcp
from hostring.transports.addresses import Interface


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


# ------------------------------------------------------------------ waiting for the others


def waiting(token: Token, name: str, **kwargs: Any) -> tuple[Any, threading.Thread, list[Any]]:
    """Joins, and waits for the others in a thread. The list gets what ended the wait: None, or an exception."""
    place, ended = join(token, name), []

    def body() -> None:
        try:
            ended.append(wait_for_all(place, **kwargs))
        except BaseException as exc:
            ended.append(exc)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return place, thread, ended


def test_a_joined_machine_waits_for_the_last_one_whatever_its_own_timeout(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are a twentieth: a rank is silent after 0.25 s, a start times out after 0.5 s, the last joins after 1.5
    s."""
    monkeypatch.setattr(claims, "SILENT_S", 0.25)
    monkeypatch.setenv("HOSTRING_TIMEOUT", "0.5")
    opened: list[Any] = []
    inviting = threading.Thread(target=lambda: opened.append(cluster.wait()), daemon=True)
    inviting.start()
    _, first, ended = waiting(cluster.token, "spark")
    time.sleep(1.5)
    assert ended == []
    _, second, also = waiting(cluster.token, "dbc")
    for thread in (first, second, inviting):
        thread.join(20)
    assert (ended, also) == ([None], [None])
    assert opened == [{0: "evo", 1: "spark", 2: "dbc"}]


def test_a_machine_that_fell_silent_is_not_counted_and_its_rank_is_free(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SILENT_S", 0.5)
    seen: list[dict[int, str]] = []
    inviting = threading.Thread(target=lambda: seen.append(cluster.wait(lambda here, left: seen.append(here))))
    inviting.start()
    join(cluster.token, "dead")  # and never shows that it is there
    time.sleep(1.0)
    end = time.monotonic() + 20
    while seen[-1] != {0: "evo"} and time.monotonic() < end:
        time.sleep(0.05)
    ranks = [waiting(cluster.token, name)[0].rank for name in ("spark", "dead")]
    inviting.join(20)
    assert ranks == [1, 2]
    assert {0: "evo", 1: "dead"} in seen
    assert seen[-1] == {0: "evo", 1: "spark", 2: "dead"}


def test_a_machine_that_leaves_gives_up_its_rank(cluster: Cluster) -> None:
    def leave(left: float) -> None:
        raise KeyboardInterrupt

    place, thread, ended = waiting(cluster.token, "spark", progress=leave)
    thread.join(20)
    assert place.rank == 1
    assert [type(exc) for exc in ended] == [KeyboardInterrupt]
    assert join(cluster.token, "dbc").rank == 1
    assert join(cluster.token, "spark").rank == 2


def test_those_who_wait_are_told_that_the_token_has_expired() -> None:
    cluster = Cluster(3, name="evo", hosts=["127.0.0.1"], lifetime=2)
    try:
        _, thread, ended = waiting(cluster.token, "spark")
        with pytest.raises(RendezvousError, match="missing are ranks 2"):
            cluster.wait()
        thread.join(20)
        assert [type(exc) for exc in ended] == [HandshakeError]
        assert "the token has expired; ranks 2 never joined" in str(ended[0])
    finally:
        cluster.close()


def test_those_who_wait_are_told_that_the_cluster_was_closed() -> None:
    cluster = Cluster(3, name="evo", hosts=["127.0.0.1"])
    _, thread, ended = waiting(cluster.token, "spark")
    cluster.close()
    thread.join(20)
    assert [type(exc) for exc in ended] == [HandshakeError]
    assert "the machine that opened the cluster has closed it" in str(ended[0])


def test_a_token_holds_no_name_of_an_interface_and_each_machine_tries_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [("lo", "::1"), ("en0", "192.168.7.9"), ("en0", "fe80::9%en0"), ("wl", "fe80::9%wl")]
    ours = [Interface(name, host) for name, host in hosts]
    monkeypatch.setattr(addresses, "interfaces", lambda: ours)
    assert addresses.with_own_scopes("fe80::1") == ["fe80::1%en0", "fe80::1%wl"]
    for host in ("192.168.7.1", "169.254.1.1", "fd00::1", "evo", "fe80::1%en0"):
        assert addresses.with_own_scopes(host) == [host]
    real = tcp.listen_at  # "fe80::1%eth7" can't be listened at here: an address of loopback stands in for it
    monkeypatch.setattr(opening, "listen_at", lambda host, port: real(host.replace("fe80::1%eth7", "127.0.0.2"), port))
    cluster = Cluster(2, name="evo", hosts=["127.0.0.1", "fe80::1%eth7"])
    try:
        assert [host for host, _ in Token.parse(str(cluster.token)).addresses] == ["127.0.0.1", "fe80::1"]
    finally:
        cluster.close()


# ------------------------------------------------------------------ from the command line


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
