"""Processes are killed, started again, and take their place in the rebuilt group: every rank, with either store."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import side_by_side

import hostring
from hostring.errors import CollectiveMismatch, HostringError, RendezvousError
from hostring.rendezvous import MemoryStore
from hostring.store.server import StoreServer
from hostring.transports.tcp import listen_at

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
SECRET = "known to three"

PROGRAM = """
import json, os, sys, time
import numpy as np, hostring
from oracle import bits, fold_in_order, rank_distinct

def right(comm):
    for k, n in enumerate((1, 3000, 100_000)):
        rows = rank_distinct(comm.world_size, n, np.float32, seed=k)
        if bits(comm.all_reduce(rows[comm.rank].copy())) != bits(fold_in_order("rank", rows)):
            return False
    return bool((comm.all_gather(np.array([comm.rank])).ravel() == np.arange(comm.world_size)).all())

def say(**what):
    print(json.dumps(what), flush=True)

comm = hostring.init(timeout=40)
say(here=comm.rank, right=right(comm))
while os.environ.get("HOSTRING_REJOIN") != "1":
    try:
        comm.barrier()
        time.sleep(0.01)
    except hostring.HostringError as exc:
        say(lost=exc.rank)
        old, comm = comm, comm.rebuild(min_ranks=3, timeout=40)
        other = comm.session.group.epoch != old.session.group.epoch
        say(again=comm.rank, world_size=comm.world_size, right=right(comm), other_epoch=other)
        break
comm.barrier()
comm.close()
say(done=True)
"""


class Rank:
    """One process, and what it says."""

    def __init__(self, program: Path, environment: dict[str, str]) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self.process = subprocess.Popen(
            [sys.executable, str(program)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, "PYTHONPATH": path},
        )
        self._said: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line)

    def says(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self._said.get(timeout=PATIENCE))
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(params=["rank 0 hosts the store", "somebody else does"])
def meeting_place(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    common = {"WORLD_SIZE": "3", "HOSTRING_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
    if request.param == "somebody else does":
        server = StoreServer([listen_at("127.0.0.1", 0)], SECRET.encode())
        yield {**common, "HOSTRING_STORE": f"127.0.0.1:{server.port}"}
        server.close()
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield {**common, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_killed_process_comes_back(dead: int, meeting_place: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM, encoding="utf-8")
    ranks = [Rank(program, {**meeting_place, "RANK": str(r)}) for r in range(3)]
    killed = ranks[dead]
    try:
        assert [r.says() for r in ranks] == [{"here": r, "right": True} for r in range(3)]
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait(10)
        ranks[dead] = Rank(program, {**meeting_place, "RANK": str(dead), "HOSTRING_REJOIN": "1"})
        for r, rank in enumerate(ranks):
            if r == dead:
                assert rank.says() == {"here": dead, "right": True}
            else:
                assert rank.says() == {"lost": dead}
                assert rank.says() == {"again": r, "world_size": 3, "right": True, "other_epoch": True}
        for rank in ranks:
            assert rank.says() == {"done": True}
            assert rank.process.wait(PATIENCE) == 0
    finally:
        for rank in [*ranks, killed]:
            rank.end()


# ------------------------------------------------------------------ what goes wrong on the way


def repeat(call: Callable[[], Any]) -> None:
    """A rank may have done its part in a call before it goes."""
    for _ in range(3):
        call()


def vanish(comm: hostring.Comm) -> None:
    comm.session.group.abort()
    comm.session.group.close()


def dies_before_it_is_linked(monkeypatch: pytest.MonkeyPatch, died: threading.Event) -> None:
    """A rank that comes back on a thread called "dying" gets its new rank, and then dies."""
    from hostring.group import group as forming

    reconnect = forming._reconnect

    def die(config: Any, *rest: Any) -> Any:
        if threading.current_thread().name == "dying":
            died.set()
            raise InterruptedError("killed")
        return reconnect(config, *rest)

    monkeypatch.setattr(forming, "_reconnect", die)


def test_a_rank_that_dies_while_the_group_is_rebuilt_spoils_one_attempt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 comes back, gets its new rank and dies before its links are made; then it comes back once more."""
    store, ready = MemoryStore(), threading.Barrier(3)
    died, retry = threading.Event(), threading.Event()

    def survivor(rank: int) -> Any:
        comm = hostring.init(rank, 3, store=store, transport="tcp", timeout=2)
        comm.barrier()
        ready.wait(15)
        with pytest.raises(HostringError) as failure:
            repeat(comm.barrier)
        assert failure.value.rank == 2
        with pytest.raises(RendezvousError):
            comm.rebuild(min_ranks=3, timeout=4)
        retry.set()
        with comm.rebuild(min_ranks=3, timeout=20) as again:
            return again.rank, float(again.all_reduce(np.array([10.0**again.rank]))[0])

    def victim() -> Any:
        comm = hostring.init(2, 3, store=store, transport="tcp", timeout=10)
        comm.barrier()
        ready.wait(15)
        vanish(comm)
        dies_before_it_is_linked(monkeypatch, died)
        threading.current_thread().name = "dying"
        with pytest.raises(InterruptedError):
            hostring.init(2, 3, store=store, transport="tcp", timeout=20, rejoin=True)
        threading.current_thread().name = "living"
        assert retry.wait(20)
        with hostring.init(2, 3, store=store, transport="tcp", timeout=20, rejoin=True) as again:
            return again.rank, float(again.all_reduce(np.array([10.0**again.rank]))[0])

    assert side_by_side([lambda: survivor(0), lambda: survivor(1), victim]) == [(0, 111.0), (1, 111.0), (2, 111.0)]
    assert died.is_set()


def test_where_all_ranks_ask_to_come_back_they_form_the_group() -> None:
    """Each had given up while the others were still there; started again, none of them is a survivor."""
    store = MemoryStore()

    def newcomer(rank: int) -> tuple[int, float]:
        time.sleep(0.3 * rank)
        with hostring.init(rank, 3, store=store, transport="tcp", timeout=20, rejoin=True) as comm:
            return comm.rank, float(comm.all_reduce(np.array([10.0**rank]))[0])

    assert side_by_side([lambda: newcomer(0), lambda: newcomer(1), lambda: newcomer(2)]) == [
        (0, 111.0),
        (1, 111.0),
        (2, 111.0),
    ]


def test_a_leader_that_falls_silent_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from hostring.group import rebuild

    monkeypatch.setattr(rebuild, "SILENT_S", 0.5)
    store = MemoryStore()
    leading = rebuild.Regrouping(store, "g", 0, 3, lambda: 1, time.monotonic() + 0.3)
    with pytest.raises(RendezvousError, match="1 here, at least 3 needed"):
        leading.survive(1)
    deadline = time.monotonic() + 20
    all_new = side_by_side(
        [
            rebuild.Regrouping(store, "g", 1, 2, lambda: 0, deadline).rejoin,
            lambda: rebuild.Regrouping(store, "g", 0, 2, lambda: 0, deadline).survive(1),
        ]
    )
    assert all_new == [rebuild.NewRank(1, 2, 2), rebuild.NewRank(0, 2, 2)]


def test_the_dead_are_not_on_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who registered and fell silent is not waited for when the links are made."""
    from hostring.group import rebuild

    monkeypatch.setattr(rebuild, "SILENT_S", 0.5)
    store = MemoryStore()
    gone = rebuild.Regrouping(store, "g", 2, 2, None, time.monotonic() + 0.2)
    store.set("g/rebuild/1/open", b"")
    with pytest.raises(RendezvousError):
        gone.rejoin()
    time.sleep(0.6)
    deadline = time.monotonic() + 20
    late = rebuild.Regrouping(store, "g", 1, 2, lambda: 0, deadline)

    def come_late() -> Any:
        time.sleep(1.0)
        return late.rejoin()

    all_new = side_by_side([lambda: rebuild.Regrouping(store, "g", 0, 2, lambda: 0, deadline).survive(1), come_late])
    assert [new.world_size for new in all_new] == [2, 2]
    assert sorted(new.rank for new in all_new) == [0, 1]


def test_frames_of_an_older_epoch_are_refused(run_ranks: Any) -> None:
    def body(comm: hostring.Comm) -> Any:
        if comm.rank == 1:
            comm.session.planner._epoch -= 1  # as if its frames had been under way since before
        with pytest.raises(CollectiveMismatch) as refused:
            comm.all_reduce(np.ones(4))
        return str(refused.value)

    for text in run_ranks(2, body):
        assert re.search(r"they differ in: epoch \(\d+ here, \d+ there\)", text)
