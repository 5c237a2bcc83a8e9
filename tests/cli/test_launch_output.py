"""What `hostring launch` shows when ranks fail:
one traceback at a time, the culprit's first; nobody is waited for in vain.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hostring.launch.output import Output


def launched(folder: Path, n: int, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = folder / "ranks.py"
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "hostring", "launch", "-n", str(n), *options, str(path)]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=60, stdin=subprocess.DEVNULL, check=False
    )


SLOW_TRACEBACK = """
import os, sys, time
rank = os.environ["RANK"]
for line in ("Traceback (most recent call last):", f'  File "{rank}.py", line 1', f"    {rank}", f"ValueError: {rank}"):
    print(line, file=sys.stderr, flush=True)
    time.sleep(0.05)
sys.exit(1)
"""


@pytest.mark.parametrize("options", [[], ["--prefix"]], ids=["plain", "prefix"])
def test_tracebacks_of_several_ranks_come_one_after_the_other(tmp_path: Path, options: list[str]) -> None:
    done = launched(tmp_path, 5, SLOW_TRACEBACK, *options)
    found = re.findall(
        r'Traceback \(most recent call last\):\n.*File "(\d).py", line 1\n.*    \1\n.*ValueError: \1\n', done.stderr
    )
    assert sorted(found) == list("01234"), done.stderr
    assert done.stderr.count("Traceback") == 5


CULPRIT = """
import atexit, time
import numpy as np
import hostring
with hostring.init(timeout=30) as comm:
    x = np.zeros(4, np.float32)
    comm.all_reduce(x)
    if comm.rank == 2:
        atexit.register(time.sleep, 0.7)  # the others have ended before
        raise KeyError("the cause")
    comm.all_reduce(x)
"""


def test_the_culprit_is_named_and_its_traceback_comes_first(tmp_path: Path) -> None:
    done = launched(tmp_path, 3, CULPRIT)
    assert done.returncode == 1
    assert re.findall(r"hostring: rank (\d) \(process \d+\) exited with code 1", done.stderr) == ["2"]
    exceptions = re.findall(r"^(?:KeyError|hostring\.errors\.\w+): .*", done.stderr, re.MULTILINE)
    assert exceptions[0] == "KeyError: 'the cause'", done.stderr
    assert all(line.startswith("hostring.errors.") for line in exceptions[1:])
    assert done.stderr.count('ranks.py", line ') >= 3, "each rank shows where it was"


LEAVES = """
import os, sys
import hostring
if os.environ["RANK"] == "1":
    sys.exit(int(os.environ["LEAVE"]))
hostring.init(timeout=300)
"""


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_rank_that_ends_before_it_joins_is_not_waited_for(
    tmp_path: Path, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAVE", "0")
    done = launched(tmp_path, n, LEAVES)
    assert done.returncode == 1
    assert "waits for rank 1, which exited with code 0 before it joined" in done.stderr


def test_a_rank_that_fails_before_it_joins_is_named_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAVE", "7")
    done = launched(tmp_path, 3, LEAVES)
    assert done.returncode == 7
    assert re.search(r"rank 1 \(process \d+\) exited with code 7; stopping the 2 that still run", done.stderr)


def test_a_rank_that_ends_well_while_others_go_on_is_no_failure(tmp_path: Path) -> None:
    text = """
import time
import hostring
with hostring.init(timeout=30) as comm:
    comm.barrier()
time.sleep(0.4 * (comm.rank + 1))
"""
    done = launched(tmp_path, 3, text)
    assert (done.returncode, done.stderr) == (0, "")


class Followed:
    """An `Output` that follows one pipe."""

    def __init__(self, prefix: bool = False) -> None:
        self.shown = io.StringIO()
        self.output = Output(prefix)
        reading, self.writing = os.pipe()
        self.output.follow(0, os.fdopen(reading, "rb"), self.shown, holds=True)

    def says(self, text: str, *, until: str) -> None:
        os.write(self.writing, text.encode())
        end = time.monotonic() + 10
        while not self.shown.getvalue().endswith(until) and time.monotonic() < end:
            time.sleep(0.005)
        assert self.shown.getvalue().endswith(until)

    def ends(self) -> str:
        os.close(self.writing)
        self.output.close()
        return self.shown.getvalue()


def test_a_line_without_its_end_appears_at_once_and_a_traceback_when_it_is_whole() -> None:
    followed = Followed()
    followed.says("50 %", until="50 %")
    followed.says("\r100 %\n", until="100 %\n")
    followed.says("Trace", until="100 %\n")
    followed.says("back (most recent call last):\n  File\nValueError: x\nmore\n", until="100 %\n")
    time.sleep(0.1)
    followed.output.release_late()
    assert followed.shown.getvalue().endswith("100 %\n"), "it may not be complete"
    followed.output.release()
    assert followed.shown.getvalue().endswith("last):\n  File\nValueError: x\nmore\n")
    followed.says("no newline", until="no newline")
    assert followed.ends().endswith("more\nno newline")


@pytest.mark.parametrize(
    ("last", "blames"),
    [("hostring.errors.PeerLostError: rank 1 is lost", True), ("KeyError: 'x'", False), ("KeyError: 'x\n y'", False)],
)
def test_whose_fault_a_traceback_says_it_is(last: str, blames: bool) -> None:
    followed = Followed(prefix=True)
    followed.says(f"Traceback (most recent call last):\n  File\n{last}\n", until="")
    text = followed.ends()
    assert text.startswith("[0] Traceback")
    followed = Followed()
    followed.says(f"Traceback (most recent call last):\n  File\n{last}\n", until="")
    os.close(followed.writing)
    assert followed.output.failed_because_of_another(0) is blames
    followed.output.close()
