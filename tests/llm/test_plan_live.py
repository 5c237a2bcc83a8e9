"""Probing: what is measured of a rank and of links, and that a group plans for itself, all ranks alike."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_jobs import job

import hostring
from hostring.integrations.llm.demo.job import BUNDLED, Job
from hostring.integrations.llm.demo.planned import plan_together
from hostring.integrations.llm.planning import few_layers, fit, live, probe
from hostring.integrations.llm.planning.ask import asked_after
from hostring.integrations.llm.planning.document import bound_of, document
from hostring.integrations.llm.planning.fit import Need, check_fit
from hostring.integrations.llm.planning.footprint import Way
from hostring.integrations.llm.planning.live import Links, plan_live
from hostring.integrations.llm.planning.memory_pool import cgroups_left, find_pool, last_cache_nbytes, machine_left
from hostring.integrations.llm.planning.model_file import read_model_file
from hostring.integrations.llm.planning.prices import ways
from hostring.integrations.llm.planning.ranks import Line, PhaseCost, RankSpec, read_ranks

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(probe, "DECODE_SECONDS", 0.02)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def like(seconds: float, name: str = "like", **changes: Any) -> RankSpec:
    cost = PhaseCost(Line(0.0, seconds), Line(0.0, seconds / 100), Line(0.0, 0.0))
    return replace(RankSpec(name, Way(), pool=name, decode=cost, prefill=cost), **changes)


def test_a_rank_knows_its_speed_in_both_phases_and_its_memory() -> None:
    spec = probe.probe(BUNDLED, "auto", "float32", CPU, "me", 2)
    assert spec.way == Way("exact", "float32", "cpu")
    assert spec.decode is not None
    assert spec.prefill is not None
    assert spec.prefill.mlp.seconds(437) > 0
    assert 0 < spec.decode.attention.seconds(1) <= spec.decode.attention.seconds(5)
    assert spec.memory_nbytes is None or spec.memory_nbytes > 1 << 20
    assert 0 < spec.duty <= 1
    assert RankSpec.from_json(json.loads(json.dumps(spec.as_json()))) == spec


def test_ways_are_priced_for_the_ranks_that_were_probed(run_ranks: Ranks) -> None:
    for choice in run_ranks(3, lambda comm: plan_live(comm, BUNDLED)):
        asked = asked_after(choice, 200)
        assert len(asked.ranks) == 3  # those that were left out too
        assert asked.price(3, 4) == choice.collective_s((0, 1, 2)) > 0
        assert asked.price(1, 4) == 0
        kinds = {way.name.partition("=")[0]: way.seconds for way in ways(asked) if not way.why_not}
        assert {"one node", "tp", "pp"} == set(kinds)
        assert all(0 < seconds < 60 for seconds in kinds.values())
    with pytest.raises(ValueError, match="--phase decode"):
        asked_after(replace(choice, problem=replace(choice.problem, phase="prefill")), 200)


def test_of_a_wide_model_only_a_part_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of it may be more than a rank can hold; so may the whole embedding."""
    model = read_model_file(BUNDLED)
    whole = probe.probe(BUNDLED, "exact", "float32", CPU, "me", 2)
    monkeypatch.setattr(probe, "MAX_PROBED_NBYTES", int(0.9 * few_layers.layer_nbytes(model, Way())))
    wide, narrow = probe.probed_sizes(model, Way())
    assert wide == (2, round(0.45 * 437), round(0.45 * 2053))
    assert narrow == (1, round(0.225 * 437), round(0.225 * 2053))
    few = few_layers.FewLayers(BUNDLED, Way(), CPU, wide, 2)
    assert len(few.step(1)) == len(few.step(5)) == 2 * 2 + 1
    part = probe.probe(BUNDLED, "exact", "float32", CPU, "me", 2)
    assert part.decode is not None
    assert whole.decode is not None
    assert part.decode.mlp.seconds(437) > 0


def test_a_group_makes_one_plan_for_all(run_ranks: Ranks) -> None:
    plans = run_ranks(3, lambda comm: document(plan_live(comm, BUNDLED, keep_all=True)))
    assert plans[0]["shares"] == plans[1]["shares"] == plans[2]["shares"]
    assert sum(plans[0]["shares"]["columns"]) == 437
    assert plans[0]["predicted"]["decode_tokens_per_s"]["predicted"] > 0
    assert plans[0]["lower_bound"]["label"] == "OPTIMISTIC LOWER BOUND"


def test_what_was_measured_is_a_ranks_file(run_ranks: Ranks, tmp_path: Path) -> None:
    told = run_ranks(2, lambda comm: document(plan_live(comm, BUNDLED, keep_all=True)))[0]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(told), encoding="utf-8")
    specs, rest = read_ranks(path, read_model_file(BUNDLED), Way())
    assert [spec.as_json() for spec in specs] == [rank["probed"] for rank in told["ranks"]]
    assert rest["collective_us"] == told["collective_us"] > 0


def test_the_bound_is_below_what_was_measured(run_ranks: Ranks) -> None:
    choice = run_ranks(1, lambda comm: plan_live(comm, BUNDLED))[0]
    bound = bound_of(choice)
    assert bound is not None
    assert 0 < bound.seconds <= choice.solution.step_s


def test_every_pair_of_ranks_is_measured(run_ranks: Ranks) -> None:
    for links in run_ranks(3, lambda comm: live.measure_links(comm, 160)):
        assert sorted(links.pairs) == [(0, 1), (0, 2), (1, 2)]
        assert links.all_s > 0


def test_fewer_ranks_wait_for_their_own_slowest_pair() -> None:
    links = Links(100e-6, [0.0] * 3, {(0, 1): 20e-6, (0, 2): 200e-6, (1, 2): 100e-6})
    assert links.collective_s((0, 1, 2)) == pytest.approx(100e-6)
    assert links.collective_s((0, 1)) == pytest.approx(10e-6)
    assert links.collective_s((1,)) == 0


def test_a_rank_that_would_slow_the_others_is_refused_by_name(
    run_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {0: like(1e-3, "a"), 1: like(1e-3, "b"), 2: like(1.0, "old box")}

    def measured(path: Any, compute: str, dtype: str, device: Any, name: str, n_ranks: int) -> RankSpec:
        return speeds[int(name.rsplit("#", 1)[1])]

    monkeypatch.setattr(live, "probe", measured)
    monkeypatch.setattr(live, "find_device", lambda device: device)

    def run(comm: hostring.Comm) -> str:
        with pytest.raises(ValueError, match=r"rank 2 \(old box\) should not take part") as refused:
            plan_together(job(plan="auto"), comm, f"#{comm.rank}")  # type: ignore[arg-type]
        return str(refused.value)

    assert len(set(run_ranks(3, run))) == 1


def test_a_rank_that_comes_back_gets_the_shares_of_the_others(run_ranks: Ranks) -> None:
    shares = ((2, 1, 2), (100, 137, 200), (1000, 1000, 53))

    def run(comm: hostring.Comm) -> Job:
        known = shares if comm.rank else ()
        return plan_together(job(plan="auto", shares=known), comm, CPU)

    assert {one.shares for one in run_ranks(3, run)} == {shares}


def test_all_ranks_plan_or_none_does(run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> None:
        with pytest.raises(ValueError, match="rank 1 was told --plan auto and others were not"):
            plan_together(job(plan="auto" if comm.rank == 1 else "even"), comm, CPU)

    run_ranks(3, run)


@pytest.mark.parametrize(("left", "fits"), [((9e9, 9e9), True), ((9e9, 3e6), False)])
def test_planned_shares_must_fit_what_is_left(
    left: tuple[float, float], fits: bool, run_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has room for less than its share: all refuse, and say whose share it is, before they read weights."""
    monkeypatch.setattr(fit, "find_pool", lambda device, index: (f"pool {index}", int(left[index])))
    uneven = job(plan="some.json", shares=((2, 3), (200, 237), (1000, 1053)))

    def run(comm: hostring.Comm) -> None:
        device = torch.device("cpu", comm.rank)
        if fits:
            assert plan_together(uneven, comm, device) == uneven
            return
        with pytest.raises(ValueError, match=r"rank 1 needs [0-9.]+ MB .* and 3.0 MB are left there"):
            plan_together(uneven, comm, device)
        assert plan_together(uneven, comm, device, loaded=True) == uneven

    run_ranks(2, run)


def test_ranks_of_one_pool_need_it_together() -> None:
    check_fit([Need("a", 60, 100), Need("b", 90, 100), None])
    with pytest.raises(ValueError, match="ranks 0, 2 together need"):
        check_fit([Need("a", 60, 100), Need("b", 90, 100), Need("a", 50, 101)])
    check_fit([Need("a", 60, None)])


def test_limits_of_cgroups_count(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n", encoding="ascii")
    assert machine_left(proc) == 4000 * 1024
    new, old = root / "work/rank", root / "memory/jobs"
    for folder, files in (
        (new, {"memory.max": "max", "memory.current": "1", "memory.stat": "inactive_file 0"}),
        (new.parent, {"memory.max": "1000", "memory.current": "700", "memory.stat": "inactive_file 200\nfile 9"}),
        (
            old,
            {"memory.limit_in_bytes": "5000", "memory.usage_in_bytes": "4000", "memory.stat": "total_inactive_file 0"},
        ),
        (old.parent, {"memory.limit_in_bytes": str((1 << 63) - 4096), "memory.usage_in_bytes": "1", "memory.stat": ""}),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="ascii")
    (proc / "self/cgroup").write_text("4:memory:/jobs\n3:cpu:/\n0::/work/rank\n", encoding="utf-8")
    assert cgroups_left(proc, root) == [(str(old), 1000), (str(new.parent), 500)]
    assert cgroups_left(tmp_path / "nothing", root) == []


def test_the_pool_of_this_process_has_a_name_and_room() -> None:
    name, left = find_pool()
    assert name == find_pool()[0]
    assert left is None or left > 0
    assert last_cache_nbytes() >= 0


@pytest.mark.slow
def test_the_demo_measures_and_then_runs(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "hostring", "demo", "--plan", "auto", "--max-tokens", "4", "--no-controls"]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text(encoding="utf-8"))
    assert told["plan"]["source"] == "auto"
    assert told["plan"]["predicted"]["decode_tokens_per_s"]["predicted"] > 0
    assert told["ranks"] + len(told["plan"]["left_out"]) == 2
