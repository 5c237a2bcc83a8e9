"""Ranks exchange what each brings, by a deadline, and name who did not come."""

from __future__ import annotations

import logging
import time

import pytest
from at_a_store import soon
from ranks import side_by_side

from hostring.errors import HandshakeError, RendezvousError
from hostring.group import waiting
from hostring.group.rendezvous import exchange
from hostring.group.waiting import Waiting
from hostring.rendezvous import MemoryStore


def test_a_fast_rank_can_start_its_next_group_while_others_form_the_first() -> None:
    store = MemoryStore()

    def fast() -> list[list[bytes]]:
        return [exchange(store, "g", 0, 2, b"fast %d" % i, soon()) for i in range(2)]

    def slow() -> list[list[bytes]]:
        time.sleep(0.3)
        first = exchange(store, "g", 1, 2, b"slow 0", soon())
        time.sleep(0.3)
        return [first, exchange(store, "g", 1, 2, b"slow 1", soon())]

    expected = [[b"fast 0", b"slow 0"], [b"fast 1", b"slow 1"]]
    assert side_by_side([fast, slow]) == [expected, expected]


def test_the_deadline_names_who_did_not_come() -> None:
    store = MemoryStore()
    outcomes = side_by_side([lambda r=r: exchange(store, "g", r, 5, b"", soon(0.5)) for r in (0, 2)])
    for rank, outcome in zip((0, 2), outcomes, strict=True):
        assert isinstance(outcome, RendezvousError)
        assert f"rank {rank} waited in vain for rank 1, 3, 4; 2 of 5 came" in str(outcome)


def test_a_second_process_of_one_rank_is_hinted_at() -> None:
    store = MemoryStore()
    side_by_side([lambda r=r: exchange(store, "g", r, 2, b"", soon()) for r in (0, 1)])
    with pytest.raises(
        RendezvousError,
        match=r"rank 0 to start for the 2\. time \(unless another process, too, says that it is rank 1\)",
    ):
        exchange(store, "g", 1, 2, b"", soon(0.3))


def test_progress_is_seen_without_any_logging_set_up(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FIRST_LINE_S", 0.2)
    monkeypatch.setattr(waiting, "MORE_LINES_S", 0.3)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    store = MemoryStore()

    def late() -> list[bytes]:
        time.sleep(0.9)
        return exchange(store, "g", 3, 4, b"3", soon())

    def punctual(r: int) -> list[bytes]:
        deadline = soon(120.0)
        progress = Waiting(r, deadline)
        progress.speaks = r == 0
        return exchange(store, "g", r, 4, b"%d" % r, deadline, progress)

    got = side_by_side([*(lambda r=r: punctual(r) for r in range(3)), late])
    assert got == [[b"0", b"1", b"2", b"3"]] * 4
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "hostring: rank 0 waits for rank 3 (3 of 4 here, 0 s of 120 s)"
    assert 2 <= len(lines) <= 4


def test_a_long_list_of_the_missing_is_shortened() -> None:
    assert waiting.names([3, 1]) == "rank 1, 3"
    assert waiting.names(range(20)) == "rank 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 4 more"


def test_what_read_refuses_is_refused_everywhere() -> None:
    store = MemoryStore()

    def read(rank: int, payload: bytes) -> bytes:
        if payload == b"bad":
            raise HandshakeError("rank 1 is bad")
        return payload

    outcomes = side_by_side(
        [
            lambda: exchange(store, "g", 0, 3, b"good", soon(), read=read),
            lambda: exchange(store, "g", 1, 3, b"bad", soon()),
        ]
    )
    assert [type(outcome) for outcome in outcomes] == [HandshakeError, HandshakeError]
    assert all("rank 1 is bad" in str(outcome) for outcome in outcomes)
