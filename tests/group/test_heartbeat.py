"""Signs of life beside the calls: who is judged, and that a stopped rank ends the calls of all groups that have it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hostring.group.config import from_environment
from hostring.group.heartbeat import LEFT, NO_SIGN, Heartbeat, Signs
from hostring.store.stores import MemoryStore

PROGRAM = """
import os, signal, sys, time
import numpy as np, hostring

comm = hostring.init(timeout=60)
part = comm.split(comm.rank // 2)
comm.barrier()
if comm.rank == 3:
    time.sleep(2)  # beats; the others wait, and see them
    os.kill(os.getpid(), signal.SIGSTOP)
began = time.monotonic()
try:
    (comm if comm.rank < 2 else part).all_reduce(np.ones(4, np.float32))
except hostring.PeerLostError as exc:
    sys.stdout.write(f"{comm.rank} lost {exc.rank}: {exc}\\n")
    sys.stdout.flush()
    time.sleep(1)  # so that no link is closed before all have noticed
    sys.exit(7)
"""


class Group:
    def __init__(self) -> None:
        self.lost: list[tuple[int, str]] = []
        self.heard = threading.Event()

    def lose(self, rank: int, reason: str) -> None:
        self.lost.append((rank, reason))
        self.heard.set()


def test_a_rank_that_beat_and_then_did_not_is_silent_once() -> None:
    signs = Signs([1, 2], 2.0)
    for n in range(4):
        assert signs.silent({1: n, 2: n}, 10.0 + n / 2) == {}
    for n in range(4, 8):
        assert signs.silent({1: n, 2: 3}, 10.0 + n / 2) == {}  # 2 s after its last beat at most
    assert signs.silent({1: 8, 2: 3}, 14.0) == {2: 2.5}
    assert signs.silent({1: 9, 2: 3}, 14.5) == {}


def test_a_rank_that_was_never_heard_is_not_judged() -> None:
    signs = Signs([1], 1.0)
    assert all(signs.silent({1: 0}, n / 4) == {} for n in range(40))


def test_a_rank_that_has_left_is_not_missed() -> None:
    signs = Signs([1], 1.0)
    assert all(signs.silent({1: min(n, 3) + (LEFT if n > 3 else 0)}, n / 4) == {} for n in range(40))


def test_whoever_stood_still_itself_judges_nobody() -> None:
    signs = Signs([1], 2.0)
    for n in range(4):
        signs.silent({1: n}, n / 2)
    assert signs.silent({1: 3}, 30.0) == {}  # the others may have stood still with it
    assert signs.silent({1: 3}, 31.0) == {}
    assert signs.silent({1: 3}, 31.9) == {}
    assert signs.silent({1: 3}, 32.8) == {1: pytest.approx(2.8)}


def test_groups_hear_of_a_silent_rank_by_their_own_numbers() -> None:
    store, whole, part, other = MemoryStore(), Group(), Group(), Group()
    mine = Heartbeat(store, "g", 0, 3, 0.5)
    mine.watch(whole, range(3))
    mine.watch(part, [2, 0])
    mine.watch(other, [0, 1])
    theirs = [Heartbeat(store, "g", rank, 3, 0.5) for rank in (1, 2)]
    until = threading.Event()
    while store.add("g/beat/0", 0) < 4 or store.add("g/beat/2", 0) < 4:
        assert not until.wait(0.05)
    store_add = store.add  # rank 2 stands still: its beats no longer arrive
    store.add = lambda key, n: store_add(key, 0 if key == "g/beat/2" else n)  # type: ignore[method-assign]
    assert whole.heard.wait(20)
    assert part.heard.wait(20)
    mine.stop()
    for one in theirs:
        one.stop()
    assert [rank for rank, _ in whole.lost] == [2]
    assert [rank for rank, _ in part.lost] == [0]
    assert whole.lost[0][1].startswith(NO_SIGN)
    assert other.lost == []


@pytest.mark.faults
def test_a_stopped_rank_ends_the_calls_of_all_groups_that_have_it(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "hostring", "launch", "-n", "4", str(script)]
    environment = {**os.environ, "HOSTRING_SILENCE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    lines = sorted(line for line in done.stdout.splitlines() if " lost " in line)
    assert [line.split(":")[0] for line in lines] == ["0 lost 3", "1 lost 3", "2 lost 1"], done.stdout + done.stderr
    assert all(NO_SIGN in line for line in lines)
    assert done.returncode == 7


@pytest.mark.parametrize("text", ["0.1", "-1", "inf", "soon"])
def test_a_silence_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOSTRING_SILENCE"):
        from_environment(environ={"HOSTRING_SILENCE": text})


def test_without_the_variable_nobody_looks() -> None:
    assert from_environment(environ={}).silence is None
    assert from_environment(environ={"HOSTRING_SILENCE": "0"}).silence is None
    assert from_environment(environ={"HOSTRING_SILENCE": "3"}).silence == 3.0
