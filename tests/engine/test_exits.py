"""Processes that end or fall silent without having closed their group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty
import numpy as np
import pytest
from lost_ranks import SOON, failure_of, numbers
from ranks import free_ports, side_by_side, successes

import hostring
from hostring import HostringError, OperationTimeout
from hostring.group.config import from_environment
from hostring.group.contract import contract, neighbours
from hostring.group.group import connect
from hostring.rendezvous import MemoryStore
from hostring.tuning.agreement import open_session

pytestmark = pytest.mark.faults


# ------------------------------------------------------------------ exit without close

SLEEP = "import time; time.sleep(0.2 * comm.rank)"
ENDS = {
    "at its end": "",
    "with work under way": f"work = comm.all_reduce(x.copy(), async_op=True) if comm.rank == 0 else None\n{SLEEP}",
    "with a message awaited": (
        "work = comm.recv(x.copy(), src=1 - comm.rank, async_op=True)\nimport time; time.sleep(0.05)"
    ),
    "by sys.exit in a thread's face": (
        "import sys, threading\nthreading.Thread(target=comm.barrier, daemon=True).start()\nsys.exit(0)"
    ),
    "holding a work": "globals()['kept'] = [comm.all_reduce(x.copy(), async_op=True) for _ in range(50)]",
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_an_exit_without_close_neither_hangs_nor_crashes(how: str, transport: str, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        f"import numpy as np, hostring\ncomm = hostring.init(timeout=60, transport={transport!r})\n"
        f"x = np.arange(1000.0)\ncomm.all_reduce(x.copy())\nprint('reduced')\n{ENDS[how]}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "hostring", "launch", "-n", "2", str(script)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.stdout.count("reduced") == 2
    assert "Fatal" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 40


def leave(comm: hostring.Comm) -> Any:
    comm.all_reduce(numbers(comm.rank))
    if comm.rank == 1:
        os._exit(3)
    return failure_of(comm)


def test_a_rank_that_exits_is_named_by_the_others(run_processes: Any) -> None:
    outcome = run_processes(3, leave)
    for rank in (0, 2):
        kind, value = outcome[rank]
        assert kind == "ok", value
        assert value[:2] == ("PeerLostError", 1)
        assert value[2] < SOON


# ------------------------------------------------------------------ what is left on disk


def die(comm: hostring.Comm) -> Any:
    comm.all_reduce(numbers(comm.rank, 3000))
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure_of(comm)[:2]


@pytest.mark.parametrize("transport", ["auto", "unix", "tcp"])
def test_a_killed_rank_leaves_nothing_on_disk(
    run_processes: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        outcome = run_processes(3, die, transport=transport, store=None)
        assert outcome == [("died", -signal.SIGKILL), *[("ok", ("PeerLostError", 0))] * 2]
        assert [name for name in os.listdir(folder) if name.startswith("hostring")] == []
        if shared:
            assert {n for n in set(os.listdir("/dev/shm")) - shared if "hostring" in n} == set()


# ------------------------------------------------------------------ slowly, or not at all


class Trickle(faulty.FaultyLink):
    """Gives one byte at a time, as often as it is asked: progress without end."""

    def _read(self, view: memoryview) -> int:
        return super()._read(view[:1])


def test_a_deadline_holds_against_a_trickle() -> None:
    store, errors = MemoryStore(), {}
    x = np.ones(1 << 20, np.float32)

    def body(rank: int) -> None:
        comm = faulty.join(rank, 2, "mesh", 20.0, store)
        for pipe in comm.session.planner._pipes.values() if rank == 0 else ():
            link = Trickle(pipe.link, faulty.Fault("none"))
            pipe.send, pipe.recv, pipe.recv_all = link.send, link.recv_into, link.recv_into_all
        started = time.monotonic()
        try:
            comm.all_reduce(x.copy(), timeout=0.5)
        except HostringError as exc:
            errors[rank] = exc, time.monotonic() - started
        comm.close()

    successes(side_by_side([lambda: body(0), lambda: body(1)]))
    assert isinstance(errors[0][0], OperationTimeout)
    assert max(seconds for _, seconds in errors.values()) < 3.0


def test_close_does_not_wait_for_ever_for_what_it_accepted(run_ranks: Any) -> None:
    release = threading.Event()

    def body(comm: hostring.Comm) -> Any:
        if comm.rank == 1:
            release.wait(20)
            return None
        works = [comm.all_reduce(numbers(0), async_op=True, timeout=60.0) for _ in range(3)]
        started = time.monotonic()
        comm.close()
        seconds = time.monotonic() - started
        release.set()
        for work in works:
            with pytest.raises(HostringError):
                work.wait(5)
        return seconds

    assert 0.5 < run_ranks(2, body, timeout=1.0)[0] < 1.0 + SOON


# ------------------------------------------------------------------ where ranks know only their neighbours


def ring_of_five(rank: int, ports: list[int], folder: Path) -> tuple[Any, hostring.Comm]:
    """A rank's group and its user's side, from a file that names its right neighbour and no store."""
    path = folder / f"{rank}.json"
    right = {"right_ip": "127.0.0.1", "right_port": ports[(rank + 1) % 5]}
    place = {"master_ip": None, "master_port": 9, "port": ports[rank], **right, "rank": rank, "world_size": 5}
    path.write_text(json.dumps(place), encoding="utf-8")
    config = from_environment(topology="ring", transport="tcp", timeout=20.0, environ={"RING_CONFIG": str(path)})
    group = connect(config, neighbours=neighbours("ring", "rank"), contract=contract("ring", "rank"))
    return group, hostring.Comm(open_session(group, "ring", "rank", "float32", 20.0))


@pytest.mark.parametrize("how", ["it vanishes", "it stands still"])
def test_in_a_ring_without_a_store_all_name_the_same_rank(how: str, tmp_path: Path) -> None:
    """Rank 3 of five has no link of any kind with rank 1:
    it hears of it from its neighbours, or asks along the chain.
    """
    ports = free_ports(5)
    ready, over = threading.Barrier(5), threading.Event()
    outcome: dict[int, Any] = {}

    def body(rank: int) -> None:
        group, comm = ring_of_five(rank, ports, tmp_path)
        comm.all_reduce(numbers(rank))
        ready.wait(20)
        if rank == 1:
            if how == "it vanishes":
                faulty.vanish(group.links)
            over.wait(20)
        else:
            started = time.monotonic()
            with pytest.raises(HostringError) as failure:
                repeat(lambda: comm.all_reduce(numbers(rank), timeout=1.0))
            outcome[rank] = type(failure.value).__name__, failure.value.rank, time.monotonic() - started < 1.0 + 1.0
        comm.close()

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(5)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        if rank == 1:
            continue
        thread.join(30)
    over.set()
    threads[1].join(30)
    kind = "PeerLostError" if how == "it vanishes" else "OperationTimeout"
    assert outcome == dict.fromkeys((0, 2, 3, 4), (kind, 1, True))


def repeat(call: Callable[[], Any]) -> None:
    for _ in range(3):
        call()
