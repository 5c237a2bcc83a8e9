"""Groups whose links are made in the background: used like others, quiet until used, and closed whatever came of it."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
from ranks import side_by_side, successes

import hostring
from hostring.group import waiting
from hostring.group.group import Found, Group
from hostring.late_comm import Background
from hostring.rendezvous import MemoryStore


@pytest.fixture
def rank_1_may(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Rank 1 makes no links before this is set."""
    go, link = threading.Event(), Found.link

    def held(self: Found) -> Group:
        if self.start.rank == 1:
            go.wait(20)
        return link(self)

    monkeypatch.setattr(Found, "link", held)
    return go


def late(rank: int, world_size: int, store: MemoryStore, timeout: float = 20.0) -> hostring.Comm:
    return hostring.init(rank, world_size, store=store, transport="tcp", timeout=timeout, background=True)


@pytest.mark.parametrize("world_size", [3, 5])
def test_who_uses_it_first_waits_for_its_links(world_size: int, rank_1_may: threading.Event) -> None:
    store = MemoryStore()

    def rank(r: int) -> list[float]:
        comm = late(r, world_size, store)
        assert repr(comm) == f"<hostring.Comm rank {r} of {world_size}, its links are being made>" or r != 1
        if r == 1:
            rank_1_may.set()
        x = np.array([10.0**r, 1.0], np.float32)
        comm.all_reduce(x)
        assert (comm.order, comm.timeout) == ("rank", 20.0)
        assert "order='rank'" in repr(comm)
        comm.close()
        with pytest.raises(hostring.GroupClosedError):
            comm.all_reduce(x)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = comm.nothing
        return x.tolist()

    expected = [float("1" * world_size), float(world_size)]
    assert successes(side_by_side([lambda r=r: rank(r) for r in range(world_size)])) == [expected] * world_size


def test_it_waits_quietly_until_it_is_used_and_then_names_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank_1_may: threading.Event
) -> None:
    monkeypatch.setattr(waiting, "FIRST_LINE_S", 0.1)
    monkeypatch.setattr(waiting, "MORE_LINES_S", 0.1)
    store = MemoryStore()
    first, second = successes(side_by_side([lambda r=r: late(r, 2, store, 1.5) for r in range(2)]))
    time.sleep(0.5)
    assert "waits" not in caplog.text
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(hostring.RendezvousError, match="rank 0 has no link with rank 1"),
    ):
        first.all_reduce(np.zeros(3, np.float32))
    assert "rank 0 waits for links with rank 1" in caplog.text
    with pytest.raises(hostring.RendezvousError, match="rank 0 has no link with rank 1"):
        first.barrier()
    first.close()  # it never was a group
    second.abort()
    rank_1_may.set()


def test_a_group_that_is_aborted_while_its_links_are_made_ends_when_they_are_there(rank_1_may: threading.Event) -> None:
    store = MemoryStore()
    first, second = successes(side_by_side([lambda r=r: late(r, 2, store) for r in range(2)]))
    second.abort("not needed")
    rank_1_may.set()
    with pytest.raises(hostring.HostringError, match="rank 1 aborted the group: not needed"):
        first.all_reduce(np.zeros(3, np.float32))
    first.close()


def test_one_thread_makes_all_groups_in_turn_and_ends() -> None:
    background, seen, go = Background(), [], threading.Event()
    before = set(threading.enumerate())

    def job(k: int) -> Any:
        go.wait(10)
        seen.append((k, threading.current_thread().name))
        if k == 1:
            raise ValueError("of job 1")
        return k

    futures = [background.submit(lambda k=k: job(k)) for k in range(4)]
    makers = [thread for thread in set(threading.enumerate()) - before if thread.name == "hostring-groups"]
    assert len(makers) == 1
    go.set()
    assert [f.result(10) for f in (futures[0], *futures[2:])] == [0, 2, 3]
    assert str(futures[1].exception(10)) == "of job 1"
    assert seen == [(k, "hostring-groups") for k in range(4)]
    makers[0].join(10)
    assert not makers[0].is_alive()
    assert background.submit(lambda: job(9)).result(10) == 9  # another thread does what comes later
