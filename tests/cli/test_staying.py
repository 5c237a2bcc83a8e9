"""A machine that stays: its rank runs again after a crash, and when the head was started again with the same token."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from pathlib import Path

import pytest

from hostring.errors import HandshakeError
from hostring.launch import staying
from hostring.launch.cluster import Cluster
from hostring.launch.joining import Place, offered_hosts
from hostring.launch.staying import Staying
from hostring.launch.token import read_token_file, write_token_file

DEADLINE_S = 20.0


class Left(BaseException):
    """What ends a machine that stays, as Ctrl-C does."""


class Machine:
    """A machine that stays, on a thread. `ends` says how its rank ends each time; None ends the machine."""

    def __init__(self, cluster: Cluster) -> None:
        self.ran: queue.Queue[tuple[int, bool, bytes]] = queue.Queue()
        self.ends: queue.Queue[int | None] = queue.Queue()
        self.said: list[str] = []
        machine = Staying(cluster.token, "spark", self._run, self.said.append)

        def body() -> None:
            place, job = machine.first()
            assert job is not None
            with contextlib.suppress(Left):
                machine.stay(place, job)

        self.thread = threading.Thread(target=body, daemon=True)
        self.thread.start()

    def _run(self, place: Place, job: bytes) -> int:
        self.ran.put((place.rank, place.rejoins, job))
        ended = self.ends.get(timeout=DEADLINE_S)
        if ended is None:
            raise Left
        return ended


def test_it_comes_back_after_a_crash_and_to_a_head_that_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staying, "MIN_PAUSE_S", 0.05)
    monkeypatch.setattr(staying, "TRY_S", 0.5)
    head = Cluster(2, name="evo", hosts=["127.0.0.1"], job=b"first")
    machine = Machine(head)
    try:
        head.wait()
        assert machine.ran.get(timeout=DEADLINE_S) == (1, False, b"first")
        machine.ends.put(1)
        assert machine.ran.get(timeout=DEADLINE_S) == (1, True, b"first")
        assert "this rank exited with code 1; this machine stays" in " ".join(machine.said)
    finally:
        head.close()
    machine.ends.put(0)
    limit = time.monotonic() + DEADLINE_S
    while not any("waiting for the head" in line for line in machine.said):
        assert time.monotonic() < limit
        time.sleep(0.01)
    (_, port), secret = head.token.addresses[0], head.token.secret
    again = Cluster(2, name="evo", hosts=["127.0.0.1"], port=port, secret=secret, job=b"second")
    try:
        again.wait()
        assert machine.ran.get(timeout=DEADLINE_S) == (1, False, b"second")
        machine.ends.put(None)
        machine.thread.join(DEADLINE_S)
        assert not machine.thread.is_alive()
    finally:
        again.close()


def test_a_token_that_never_let_it_in_is_an_error_at_once() -> None:
    head = Cluster(2, name="evo", hosts=["127.0.0.1"], lifetime=-1.0)
    try:
        with pytest.raises(HandshakeError, match="expired"):
            Staying(head.token, "spark", lambda place, job: 0, print).first()
    finally:
        head.close()


def test_a_token_file_keeps_the_token_for_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert read_token_file(file) is None
    head = Cluster(2, name="evo", hosts=["127.0.0.1"])
    try:
        write_token_file(file, head.token)
        assert read_token_file(file) == head.token
        assert file.stat().st_mode & 0o77 == 0
        assert offered_hosts(head.place.environment()) == ["127.0.0.1"]
    finally:
        head.close()
    file.write_text("no token", encoding="utf-8")
    with pytest.raises(ValueError, match=r"--token-file .*remove the file for a new token"):
        read_token_file(file)
