"""Records of several ranks as one: clocks, culprits, and the critical path."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hostring.commands.cli import app
from hostring.tracing.clocks import compare, shifted
from hostring.tracing.culprits import LATE, STOOD, critical_path, delays
from hostring.tracing.timeline import Timeline, side_by_side

LATENCY_S = 1e-4


def recorded(
    began: list[list[float]], stood: dict[tuple[int, int], float], clocks: list[float]
) -> list[dict[str, Any]]:
    """What ranks would record of all_reduces in which each needs a message from each.

    Args:
        began: seconds by call and rank, if nothing delays it; a rank begins a call no earlier than it ended the last.
        stood: by (call, rank), for how long it is stopped when it has begun, before it sends.
        clocks: by rank, how far its clock is ahead.
    """
    n = len(clocks)
    documents = [
        {"group": "g", "rank": r, "world_size": n, "failure": None, "operations": []} for r in range(n)
    ]  # fmt: skip
    ended = [0.0] * n
    for seq, wished in enumerate(began):
        starts = [max(wished[r], ended[r]) for r in range(n)]
        sent = [starts[r] + stood.get((seq, r), 0.0) for r in range(n)]
        for r in range(n):
            others = [q for q in range(n) if q != r]
            latest = max(others, key=lambda q: sent[q])
            ended[r] = max(sent[latest], sent[r]) + LATENCY_S
            wait = max(0.0, ended[r] - starts[r] - LATENCY_S / 2)  # a stopped rank thinks that it waited for a peer
            documents[r]["operations"].append(_row(seq, starts[r] + clocks[r], ended[r] - starts[r], wait, latest))
    return documents


def _row(seq: int, started: float, seconds: float, wait: float, waited_for: int) -> dict[str, Any]:
    names = {"collective": "all_reduce", "op": "sum", "schedule": "mesh/one_shot", "dtype": "float32"}
    counts = {"seq": seq, "n_elements": 9, "sent": 36, "received": 36, "fold": 0.0}
    return {**names, **counts, "started": started, "seconds": seconds, "wait": wait, "waited_for": waited_for}


def merged(documents: list[dict[str, Any]]) -> Timeline:
    return side_by_side(shifted(documents, compare([d["operations"] for d in documents])))


def steps(n_ranks: int, n_calls: int = 6) -> list[list[float]]:
    return [[0.01 * call + 1e-5 * rank for rank in range(n_ranks)] for call in range(n_calls)]


@pytest.mark.parametrize("ahead", [[0.0, 3.0, -7.5], [0.0, 1e-3, 0.4, -2.0, 55.0]])
def test_clocks_are_compared_by_common_calls(ahead):
    found = compare([d["operations"] for d in recorded(steps(len(ahead)), {}, ahead)])
    assert found.n_calls == 6
    for offset, unsure, seconds in zip(found.offsets, found.uncertainties, ahead, strict=True):
        assert abs(offset + seconds) <= unsure + 1e-9
        assert unsure <= 2 * LATENCY_S


def test_without_common_calls_clocks_are_left_alone():
    documents = recorded(steps(2), {}, [0.0, 3.0])
    for row in documents[1]["operations"]:
        row["collective"] = "broadcast"  # whose root waits for nobody
    found = compare([d["operations"] for d in documents])
    assert (found.offsets, found.n_calls) == ((0.0, 0.0), 0)


@pytest.mark.parametrize("n", [3, 5])
def test_a_rank_that_stood_still_inside_a_call_is_named_once(n):
    """It believes that it waited for its peers, and all are late for the next calls."""
    for victim in range(n):
        (delay,) = delays(merged(recorded(steps(n), {(2, victim): 0.2}, [0.5 * r for r in range(n)])))
        assert delay.cause == (victim, STOOD, 2)
        assert set(delay.waits) == set(range(n)) - {victim}
        assert delay.seconds == pytest.approx(0.2, abs=1e-3)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_rank_that_came_late_is_named_once(n):
    for victim in range(n):
        began = steps(n)
        for call in range(3, 6):
            began[call][victim] += 0.2
        (delay,) = delays(merged(recorded(began, {}, [-2.0 * r for r in range(n)])))
        assert delay.cause == (victim, LATE, 3)
        assert set(delay.waits) == set(range(n)) - {victim}


def test_a_delay_that_goes_on_is_told_where_it_began():
    """Rank 0 held up rank 1 in a call of these two; so rank 1 came late to a call with rank 2."""
    documents = recorded(steps(3, 2), {}, [0.0, 0.0, 0.0])
    for rank, (started, seconds, wait) in enumerate([(0.2, 1e-4, 0.0), (0.0, 0.2001, 0.2), (0.0, 1e-4, 0.0)]):
        documents[rank]["operations"][0] = _row(0, started, seconds, wait, 0)
    for rank, (started, seconds, wait) in enumerate(
        [(0.2001, 2e-4, 1e-4), (0.2002, 1e-4, 0.0), (0.001, 0.1993, 0.1992)]
    ):
        documents[rank]["operations"][1] = _row(1, started, seconds, wait, 1)
    (delay,) = delays(side_by_side(documents))
    assert delay.cause == (0, LATE, 0)
    assert delay.waits[2] == pytest.approx(0.2, abs=2e-3)


def test_the_critical_path_runs_over_the_slow_rank():
    began = [[0.1 * call if rank != 1 else 0.3 * call for rank in range(3)] for call in range(6)]
    shares = critical_path(merged(recorded(began, {}, [0.0, 9.0, -9.0])))
    assert shares[1].between == pytest.approx(1.5, abs=2e-3)
    assert sum(share.between + share.inside for share in shares.values()) == pytest.approx(1.5, abs=2e-3)


STOPPED = """
    import os, signal, subprocess, sys, time
    import numpy as np
    import hostring

    with hostring.init() as comm:
        x, over = np.ones(1000, np.float32), np.zeros(1, np.int32)
        for _ in range(30):
            comm.all_reduce(x)
        if comm.rank == 1:
            me = os.getpid()
            helper = subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep 0.2; kill -CONT {me}"])
        while not over[0]:
            comm.all_reduce(x)
            time.sleep(0.001)
            over[0] = comm.rank == 1 and helper.poll() is not None
            comm.all_reduce(over, "max")
"""


def test_a_rank_that_was_stopped_for_200_ms(tmp_path: Path):
    script, records = tmp_path / "script.py", tmp_path / "records"
    script.write_text(textwrap.dedent(STOPPED), encoding="utf-8")
    command = [sys.executable, "-m", "hostring", "launch", "-n", "3", str(script)]
    subprocess.run(command, check=True, timeout=60, env={**_environment(), "HOSTRING_DUMP": str(records)})
    chrome = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["trace", "--merge", str(records), "--chrome", str(chrome)])
    assert done.exit_code == 0, done.output
    told = [(float(ms), rank) for ms, rank in re.findall(r"^([\d.]+) ms: rank (\d)", done.output, re.MULTILINE)]
    assert [rank for ms, rank in told if ms > 150] == ["1"], done.output
    assert "mesh/one_shot" in done.output
    assert chrome.exists()


def _environment() -> dict[str, str]:
    import os

    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root}


def test_trace_without_files_says_what_to_name():
    done = CliRunner().invoke(app, ["trace"])
    assert done.exit_code != 0
    assert "--merge" in done.output or "--merge" in str(done.exception)
