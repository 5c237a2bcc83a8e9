"""Exit codes of children as a shell reports them, and cores for ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hostring.launch.cores import core_for, pin
from hostring.launch.exits import exit_code, how_it_ended


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("pass", 0, "exited with code 0"),
        ("raise SystemExit(7)", 7, "exited with code 7"),
        ("import os; os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", 143, "was killed by SIGTERM"),
    ],
)
def test_a_child_s_end_is_reported_as_a_shell_does(program: str, code: int, words: str) -> None:
    returncode = subprocess.run([sys.executable, "-c", program], check=False).returncode
    assert (exit_code(returncode), how_it_ended(returncode)) == (code, words)


def test_an_unknown_signal_is_named_by_its_number() -> None:
    number = max(signal.valid_signals()) + 1
    assert how_it_ended(-number) == f"was killed by signal {number}"


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_a_cluster_s_rank_that_is_killed_ends_the_command_with_137(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Both sides of `hostring cluster` run the program as a child and report how that child ended."""
    from hostring.commands.cluster import _run

    script = tmp_path / "killed.py"
    script.write_text(KILLED, encoding="utf-8")
    assert _run([str(script)], False, {}) == 137


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_ranks_get_cores_of_their_own_while_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: masks.append(set(cores)))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert [core_for(rank) for rank in range(5)] == [2, 3, 5, 7, 2]
    for rank in range(2):
        pin(rank, 2)
    for rank in range(5):
        pin(rank, 5)  # more ranks than cores: the scheduler does better without a mask
    assert masks == [{2, 3}, {5, 7}]
    assert os.environ["OMP_NUM_THREADS"] == "4"
    pin(4)
    assert masks[-1] == {2}
    assert os.environ["OMP_NUM_THREADS"] == "1"
