"""The flight recorder keeps what happened, also what failed, and a viewer can read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hostring
from hostring.commands.cli import app
from hostring.engine.recorder import KEPT, chrome_trace
from hostring.topologies import TOPOLOGIES, schedule_name


def test_every_operation_leaves_a_line(run_ranks: Any) -> None:
    def body(comm: hostring.Comm) -> list[dict[str, Any]]:
        comm.all_reduce(np.ones(7, np.float32))
        comm.broadcast(np.ones((2, 3), np.int16), root=1)
        comm.barrier()
        return comm.recorder.rows()

    for rank, rows in enumerate(run_ranks(3, body)):
        assert [(r["seq"], r["collective"], r["dtype"], r["n_elements"]) for r in rows] == [
            (0, "all_reduce", "float32", 7),
            (1, "broadcast", "int16", 6),
            (2, "barrier", "uint8", 0),
        ]
        assert all(0 <= r["wait"] + r["fold"] <= r["seconds"] for r in rows)
        assert all(r["waited_for"] is None or r["waited_for"] in {0, 1, 2} - {rank} for r in rows)
        assert [r["started"] for r in rows] == sorted(r["started"] for r in rows)


def test_a_line_names_the_schedule_and_the_bytes(run_ranks: Any) -> None:
    """The same bytes as the counters: in the short form, in several rounds, and when a peer's dtype makes them
    fewer."""

    def body(comm: hostring.Comm) -> list[tuple[Any, ...]]:
        found = []
        calls: list[Any] = [
            lambda: comm.all_reduce(np.ones(7, np.float32)),
            lambda: comm.all_reduce(np.ones(300_000, np.float32)),
            lambda: comm.all_reduce(np.ones(40, np.float16 if comm.rank == 1 else np.float32)),
            lambda: comm.all_reduce(np.ones(40, np.float16 if comm.rank == 1 else np.float32)),
            lambda: comm.broadcast(np.ones((2, 3), np.int16), root=1),
            lambda: comm.all_gather(np.ones(5, np.float64)),
            lambda: comm.barrier(),
        ]
        for call in calls:
            before = comm.counters.payload_sent, comm.counters.payload_received
            call()
            moved = comm.counters.payload_sent - before[0], comm.counters.payload_received - before[1]
            row = comm.recorder.rows()[-1]
            found.append((row["schedule"], (row["sent"], row["received"]), moved))
        return found

    for rows in run_ranks(3, body):
        names = [name for name, _, _ in rows]
        assert names == ["mesh/one_shot", "mesh/two_shot", "mesh/one_shot", "mesh/one_shot", "mesh", "mesh", "mesh"]
        for name, recorded, moved in rows:
            assert recorded == moved, name
        assert rows[0][1] == (2 * 28, 2 * 28)


def test_every_schedule_has_a_name() -> None:
    for topology in TOPOLOGIES.values():
        assert schedule_name(topology.code << 8) == topology.name
        for name, variant in topology.variants.items():
            assert schedule_name(topology.code << 8 | variant.code) == f"{topology.name}/{name}"
    assert schedule_name(0xFFFF) == "schedule 65535"


def test_only_the_last_thousand_are_kept(run_ranks: Any) -> None:
    def body(comm: hostring.Comm) -> tuple[int, int]:
        x = np.zeros(1, np.float32)
        for _ in range(KEPT + 5):
            comm.all_reduce(x)
        rows = comm.recorder.rows()
        return len(rows), rows[-1]["seq"]

    assert run_ranks(2, body) == [(KEPT, KEPT + 4)] * 2


def test_a_failure_is_dumped_by_every_rank_and_shown(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTRING_DUMP", str(tmp_path))

    def body(comm: hostring.Comm) -> str:
        comm.all_reduce(np.ones(3, np.float32))
        with pytest.raises(hostring.CollectiveMismatch) as failure:
            comm.all_reduce(np.ones(3 + comm.rank, np.float32))
        return str(failure.value)

    run_ranks(2, body)
    documents = [
        json.loads((tmp_path / f"hostring-world-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)
    ]
    for rank, document in enumerate(documents):
        assert document["rank"] == rank
        assert (
            "all_reduce #1 of 3 elements" in document["failure"] or "all_reduce #1 of 4 elements" in document["failure"]
        )
        assert [row["n_elements"] for row in document["operations"]] == [3, 3 + rank]
    trace = chrome_trace(documents)
    slices = [e for e in trace["traceEvents"] if e["name"] == "all_reduce"]
    assert {e["pid"] for e in slices} == {0, 1}
    assert all(e["dur"] > 0 for e in slices)
    out = tmp_path / "trace.json"
    shown = CliRunner().invoke(app, ["trace", str(tmp_path), "--chrome", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "all_reduce" in shown.output
    assert "operations of 2 ranks" in shown.output
    assert "mesh/one_shot" in shown.output
    assert json.loads(out.read_text(encoding="utf-8")) == trace


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hostring-x.json").write_text("[]", encoding="utf-8")
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert isinstance(result.exception, ValueError)
    assert "no flight record" in str(result.exception)
