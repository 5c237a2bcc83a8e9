"""Measured tables: how they are made, saved and agreed on. No timings are judged."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from oracle import bits, fold_in_order, rank_distinct

from hostring.cost.network import one_host
from hostring.engine.choice import WHOLE, Tuner
from hostring.errors import HostringError
from hostring.topologies import TOPOLOGIES
from hostring.topologies.rules import read_rules
from hostring.tuning import timing, trial
from hostring.tuning.agreement import share
from hostring.tuning.saved import tuning_path
from hostring.tuning.tables import Curve, Tuning, load, save

pytestmark = pytest.mark.usefixtures("no_file_of_the_user")


def tuning_of(world_size, way=("ring", "chain")):
    curve = Curve("all_reduce", *way, 1 << 16, {64: 1e-6, 1 << 20: 1e-3}, {64: 1e-6, 1 << 20: 1e-3})
    return Tuning("a test's tuning", one_host(world_size, 2), [curve])


def test_nothing_is_counted_before_the_first_call(run_ranks):
    def body(comm):
        assert comm.recorder.rows() == []
        return comm.counters.snapshot()

    for snapshot in run_ranks(3, body):
        assert snapshot["calls"] == {}
        assert snapshot["payload_sent"] == snapshot["payload_received"] == snapshot["header_sent"] == 0
        assert sum(snapshot["seconds"].values()) == 0 == len(snapshot["waited_for"])


def test_what_rank_0_has_saved_is_used_by_all(run_ranks):
    def body(comm):
        if comm.rank == 0:
            save(tuning_of(3), tuning_path(comm.session))
        return tuning_path(comm.session)

    paths = run_ranks(3, body)
    assert len(set(paths)) == 1
    assert json.loads(paths[0].read_text(encoding="utf-8"))["source"] == "a test's tuning"
    rows = rank_distinct(3, 5000)

    def again(comm):
        return (
            comm.session.tuner.source,
            comm.session.tuner.all_reduce(10, 4).name,
            bits(comm.all_reduce(rows[comm.rank].copy())),
        )

    for source, name, result in run_ranks(3, again):
        assert (source, name) == ("a test's tuning", "ring/chain")
        assert result == bits(fold_in_order("rank", rows))
    assert run_ranks(2, lambda comm: comm.session.tuner.source) == ["the defaults for one host"] * 2, (
        "another world size is another group"
    )


def test_a_saved_schedule_that_the_rules_forbid_is_not_used(run_ranks, monkeypatch, tmp_path):
    save(tuning_of(3), tmp_path / "t.json")
    monkeypatch.setenv("HOSTRING_TUNING", str(tmp_path / "t.json"))
    assert run_ranks(3, lambda comm: comm.session.tuner.all_reduce(10, 4).name, topology="star") == ["star/stream"] * 3


SCRIPT = """
    import os, sys
    if os.environ["RANK"] != "0":
        os.environ["HOSTRING_TUNING"] = "off"
    import hostring
    with hostring.init() as comm:
        tuner = comm.session.tuner
        table = {c: [(t.upto, t.topology, t.variant, t.segment_nbytes) for t in ts] for c, ts in tuner.table.items()}
        sys.stdout.write(f"{tuner.source} {hash(repr(table))} {tuner.all_reduce(1000, 4).name}\\n")
"""


def test_only_rank_0_decides(tmp_path):
    save(tuning_of(2, ("star", "stream")), tmp_path / "t.json")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    env = {**os.environ, "HOSTRING_TUNING": str(tmp_path / "t.json"), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "hostring.commands.cli", "launch", "-n", "2", str(tmp_path / "script.py")]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert lines[0].startswith("a test's tuning")
    assert lines[0].endswith("star/stream")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 0}', '{"version": 1, "source": "", "network": {}, "curves": []}']
)
def test_a_file_that_is_no_tuning_is_named_on_every_rank(run_ranks, monkeypatch, tmp_path, content):
    (tmp_path / "t.json").write_text(content, encoding="utf-8")
    monkeypatch.setenv("HOSTRING_TUNING", str(tmp_path / "t.json"))
    for error in run_ranks(2, lambda comm: None, check=False):
        assert isinstance(error, HostringError)
        assert "t.json" in str(error)


def test_a_tuning_of_another_group_is_refused(run_ranks, monkeypatch, tmp_path):
    save(tuning_of(5), tmp_path / "t.json")
    monkeypatch.setenv("HOSTRING_TUNING", str(tmp_path / "t.json"))
    for error in run_ranks(2, lambda comm: None, check=False):
        assert "5 ranks, this group has 2" in str(error)


def test_each_choice_is_explained_once(run_ranks, monkeypatch, tmp_path, capfd):
    save(tuning_of(2), tmp_path / "t.json")
    monkeypatch.setenv("HOSTRING_TUNING", str(tmp_path / "t.json"))
    monkeypatch.setenv("HOSTRING_TRACE", "1")

    def body(comm):
        for n in (100, 100, 5000):
            comm.all_reduce(np.ones(n, np.float32))
        comm.session.planner.drop()
        comm.all_reduce(np.ones(100, np.float32))
        comm.broadcast(np.ones(3, np.float32))

    run_ranks(2, body, topology="broadcast:star")
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hostring: ")]
    assert len(lines) == 3
    assert lines[0].startswith("hostring: all_reduce of 400 bytes goes by ring/chain: a test's tuning; ring/chain 64K ")
    assert "topology='broadcast:star' leaves 1" in lines[2]


def test_a_curve_prefers_what_was_measured():
    curve = Curve("all_reduce", "mesh", "one_shot", 0, {64: 1.0, 1024: 2.0, 4096: 8.0}, {1024: 4.0})
    assert curve.seconds(1024) == 4.0
    assert curve.seconds(4096) == pytest.approx(16.0), (
        "the prediction, put right by what the nearest measurement showed"
    )
    assert curve.seconds(64) == pytest.approx(2.0)
    assert Curve("all_reduce", "mesh", "one_shot", 0, {64: 1.0, 256: 4.0}).seconds(128) == pytest.approx(2.0)


def test_the_table_takes_the_quickest_and_stays_where_little_is_gained():
    a = Curve("all_reduce", "mesh", "one_shot", 0, {64: 1.0, 1 << 20: 100.0}, {64: 1.0, 1 << 20: 100.0})
    b = Curve("all_reduce", "mesh", "two_shot", 0, {64: 2.0, 1 << 20: 50.0}, {64: 2.0, 1 << 20: 50.0})
    close = Curve("all_reduce", "star", "stream", 0, {64: 0.99, 1 << 20: 99.0}, {64: 0.99, 1 << 20: 99.0})
    untried = Curve("all_reduce", "ring", "chain", 0, {64: 1e-3, 1 << 20: 1e-3})
    table = Tuning("", one_host(4, 2), [a, b, close, untried]).table(Tuner("auto", "rank", 4))["all_reduce"]
    assert [t.variant for t in table] == ["one_shot", "two_shot"]
    assert 1 << 12 <= table[0].upto <= 1 << 14, "the curves cross at 8 KB"
    assert table[-1].upto == WHOLE


def test_a_tuning_survives_its_file(tmp_path):
    before = tuning_of(3)
    save(before, tmp_path / "deep" / "t.json")
    assert load(tmp_path / "deep" / "t.json") == before
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["t.json"]


@pytest.mark.parametrize("topology", ["auto", "ring", "star"])
def test_tuning_measures_links_and_tries_what_is_allowed(run_ranks, topology):
    rows = rank_distinct(4, 3000)

    def body(comm):
        found = trial.tune(
            comm.session, collectives=("all_reduce", "broadcast"), sizes=(64, 4096), seconds=1e-4, rounds=1
        )
        share(comm.session, found)
        return found, comm.session.tuner.table, comm.session.tuner.source, bits(comm.all_reduce(rows[comm.rank].copy()))

    results = run_ranks(4, body, topology=topology)
    found = results[0][0]
    neighbours = TOPOLOGIES["mesh" if topology == "auto" else topology].neighbours
    links = {(a, b) for a, b in itertools.product(range(4), repeat=2) if b in neighbours(a, 4)}
    allowed = read_rules(topology, "rank").allowed("all_reduce", "rank", 4)
    assert set(found.network.special) == links
    assert all(line.latency > 0 and line.rate > 0 for line in found.network.special.values())
    assert {c.way for c in found.curves if c.collective == "all_reduce"} == set(allowed)
    if topology == "auto":
        assert all(seconds > 0 for c in found.curves for seconds in c.measured.values())
        assert any(c.measured for c in found.curves)
    tables = [table for _, table, _, _ in results]
    assert all({c: list(t) for c, t in table.items()} == {c: list(t) for c, t in tables[0].items()} for table in tables)
    assert {(source, result) for _, _, source, result in results} == {(found.source, bits(fold_in_order("rank", rows)))}
    assert Tuning.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_group_can_be_measured_at_its_start(run_ranks, monkeypatch):
    monkeypatch.setenv("HOSTRING_TUNING", "measure")
    monkeypatch.setattr(trial, "SIZES", (64, 4096))
    for source, calls in run_ranks(2, lambda comm: (comm.session.tuner.source, dict(comm.counters.calls))):
        assert source == "links measured at start"
        assert calls == {}


def test_what_is_half_as_slow_again_is_not_tried_again():
    ways = [timing.Way("all_reduce", "mesh", "one_shot", segment) for segment in (1, 2, 3, 4)]
    found = dict(zip(ways, (1.5, 1.0, 1.51, 9.0), strict=True))
    assert timing.hopeful(ways, found) == ways[:2]
    assert timing.hopeful(ways[2:], found) == []  # the best of all counts, also when it is no longer tried
