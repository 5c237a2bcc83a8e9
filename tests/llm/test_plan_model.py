"""`hostring plan model`: from a header to legal shares, fast ones, or a refusal that says why."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from model_headers import sparse_gguf

from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.planning.ask import parse_memory, plan_for
from hostring.integrations.llm.planning.budget import Budget
from hostring.integrations.llm.planning.document import document, lines
from hostring.integrations.llm.planning.legal import check_legal, nearest_legal
from hostring.integrations.llm.planning.model_file import read_model_file
from hostring.integrations.llm.planning.plan_file import read_plan
from hostring.integrations.llm.planning.shares import DoesNotFit, need_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return sparse_gguf(tmp_path / "m.gguf")


def ranks_file(path: Path, *ranks: dict[str, Any], **rest: Any) -> Path:
    path.write_text(json.dumps({"ranks": ranks, **rest}), encoding="utf-8")
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_the_header_of_a_huge_checkpoint_is_planned_in_little_memory_and_time(tmp_path: Path) -> None:
    """A sparse file of 100 GB, in a process of its own: weights are never read, and torch is not imported."""
    path = sparse_gguf(
        tmp_path / "huge.gguf", layers=93, hidden=8192, columns=32768, heads=64, kv_heads=8, head_dim=128, vocab=150_000
    )
    assert path.stat().st_size > 80e9
    code = (
        "import sys; from hostring.commands.cli import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "finally:\n"
        "    status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "    print('MB', int(status['VmHWM'].split()[0]) // 1024, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "plan", "model", str(path), "--ranks", "3", "--tokens-per-s", "50"]
    begun = time.monotonic()
    done = subprocess.run([*command, "--collective-us", "200"], capture_output=True, text=True, timeout=60)
    took = time.monotonic() - begun
    assert "186 collectives" in done.stdout, done.stderr
    assert "INFEASIBLE" in done.stdout
    assert done.returncode == 1
    mb, torch = done.stdout.splitlines()[-1].split()[1:]
    assert int(mb) < 150
    assert torch == "False"
    assert took < 60, "ten seconds on a machine with nothing else to do"


def test_a_plan_covers_the_model_on_borders_of_units(model: Path) -> None:
    for n in (1, 2, 3, 4):
        choice = plan_for(model, n)
        choice.solution.plan.check(choice.problem.model.config)
        units = choice.problem.model.units
        assert units is not None
        assert sum(units.groups_per_rank(choice.solution.plan)) == len(units.groups)
        assert sum(units.columns_per_rank(choice.solution.plan)) == len(units.columns)
        told = document(choice)
        assert (told["layers"], told["boundaries"], len(told["boundaries_per_layer"])) == (4, 8, 2)
        assert len(told["ranks"]) == n
        assert told["predicted"] is None


def test_weights_are_counted_as_the_file_has_them(model: Path) -> None:
    choice = plan_for(model, 3)
    held = [rank["weight_bytes"] for rank in document(choice)["ranks"]]
    small = choice.problem.footprints[0].fixed
    assert sum(held) - 2 * small == pytest.approx(read_model_file(model).nbytes, abs=3)


def test_exact_ranks_hold_dequantised_weights_and_every_embedding_row() -> None:
    import hostring
    from hostring.integrations.llm.checkpoint.weights import open_checkpoint
    from hostring.integrations.llm.sharded import build

    choice = plan_for(BUNDLED, 1, dtype="float32")
    with hostring.init(0, 1) as comm:
        part = build(open_checkpoint(BUNDLED), comm)
    assert document(choice)["ranks"][0]["weight_bytes"] == part.forward.nbytes_held


def test_more_ranks_than_groups_get_the_nearest_legal_plans(model: Path) -> None:
    with pytest.raises(ValueError, match="the nearest legal plans have 4 ranks or 3 ranks"):
        plan_for(model, 5)


def test_more_exact_ranks_than_groups_share_kv_heads(model: Path, tmp_path: Path) -> None:
    choice = plan_for(model, 6, compute="exact")
    plan = choice.solution.plan
    assert plan.kv_groups == (1,) * 6
    assert sum(plan.heads) == 8
    plan.check(choice.problem.model.config)
    held = [rank["weight_bytes"] - choice.problem.footprints[0].fixed for rank in document(choice)["ranks"]]
    assert held == [4 * plan.n_elements(choice.problem.model.config, rank) for rank in range(6)]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document(choice)), encoding="utf-8")
    assert read_plan(path, choice.problem.model.config).plan == plan
    with pytest.raises(ValueError, match="can't share 8 query heads"):
        plan_for(model, 9, compute="exact")
    with pytest.raises(DoesNotFit, match=r"rank \d \(rank \d\) would need"):
        plan_for(model, 6, compute="exact", memory="1MB")


def test_memory_of_three_to_one_is_met_by_an_uneven_split(model: Path) -> None:
    even = plan_for(model, 2)
    needs = [need_of(even.problem, even.solution.plan, rank) for rank in (0, 1)]
    budget = int(1.05 * sum(needs) / 4)
    memory = f"{3 * budget},{budget}"
    assert budget < needs[1], "the even split doesn't fit"
    uneven = plan_for(model, 2, memory=memory)
    assert [need_of(uneven.problem, uneven.solution.plan, r) <= b for r, b in ((0, 3 * budget), (1, budget))] == [
        True
    ] * 2


def test_what_fits_nowhere_is_refused_with_rank_need_and_offer(model: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"rank \d \(rank \d\) would need [0-9.]+ MB and offers [0-9.]+ MB"):
        plan_for(model, 2, memory="3MB,1MB")
    with pytest.raises(DoesNotFit, match="all ranks together need"):
        plan_for(model, 1, memory="1MB")


def test_ranks_of_one_host_share_its_memory(model: Path, tmp_path: Path) -> None:
    alone = plan_for(model, 1)
    need = need_of(alone.problem, alone.solution.plan, 0)
    half = {"memory_gb": 0.6 * need / 1e9, "decode_gb_per_s": 5}
    one_host = ranks_file(tmp_path / "one.json", {**half, "host": "a"}, {**half, "host": "a"})
    with pytest.raises(DoesNotFit, match=r"rank 0 \(rank 0\) and rank 1 \(rank 1\)"):
        plan_for(model, one_host)
    plan_for(model, ranks_file(tmp_path / "two.json", {**half, "host": "a"}, {**half, "host": "b"}))


def test_faster_ranks_get_more_and_a_slow_one_is_left_out_by_name(tmp_path: Path) -> None:
    path = sparse_gguf(tmp_path / "m.gguf", layers=8, columns=8192, kv_heads=8)
    fast = {"decode_gb_per_s": 10}
    ranks = ranks_file(
        tmp_path / "r.json", fast, fast, fast, {"name": "old box", "decode_gb_per_s": 0.1}, collective_us=5
    )
    choice = plan_for(path, ranks)
    assert [(one.rank, one.name) for one in choice.left_out] == [(3, "old box")]
    assert choice.kept == (0, 1, 2)
    assert "with it" in choice.left_out[0].why
    assert "predicted" in choice.left_out[0].why
    everyone = plan_for(path, ranks, keep_all=True)
    assert everyone.solution.step_s > choice.solution.step_s
    assert document(choice)["left_out"][0]["name"] == "old box"


def test_one_node_is_said_to_be_faster(model: Path, tmp_path: Path) -> None:
    fast = {"decode_gb_per_s": 10}
    slow_links = ranks_file(tmp_path / "r.json", fast, fast, collective_us=5000)
    choice = plan_for(model, slow_links)
    assert len(choice.kept) == 1
    assert "one node is faster" in "\n".join(lines(choice))
    both = plan_for(model, slow_links, keep_all=True)
    assert "one node is faster: rank 0 alone makes predicted" in document(both)["statement"]
    quick = plan_for(model, ranks_file(tmp_path / "q.json", fast, fast, collective_us=1))
    assert "2 ranks together are faster" in document(quick)["statement"]


def test_shares_follow_speed(tmp_path: Path) -> None:
    path = sparse_gguf(tmp_path / "m.gguf", kv_heads=8, columns=4096)
    ranks = ranks_file(
        tmp_path / "r.json", {"decode_gb_per_s": 3, "compute": "exact"}, {"decode_gb_per_s": 9, "compute": "exact"}
    )
    plan = plan_for(path, ranks).solution.plan
    assert plan.kv_groups == (2, 6)
    assert plan.columns == (1024, 3072)
    assert plan.vocab == (250, 750)


def test_a_quota_is_levelled_over_the_whole_lane(tmp_path: Path) -> None:
    """What a rank under a quota saves while it waits, it may use in the next region."""
    path = sparse_gguf(tmp_path / "m.gguf", kv_heads=4, columns=4096)
    like = {"decode_gb_per_s": 10, "compute": "exact"}
    ranks = ranks_file(tmp_path / "r.json", {**like, "duty": 0.4}, {**like, "duty": 0.6})
    choice = plan_for(path, ranks)
    lanes = [s / d for s, d in zip(choice.solution.lanes(4), (0.4, 0.6), strict=True)]
    assert choice.solution.tie == "lanes"
    assert max(lanes) <= 1.02 * min(lanes)


def test_the_command_writes_what_it_prints(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "hostring", "plan", "model", str(model), "--ranks", "3", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text(encoding="utf-8"))
    assert told["shares"]["sha256"][:12] in done.stdout
    assert "PartialSum -> Replicated" in done.stdout
    assert sum(told["shares"]["kv_groups"]) == 4


@pytest.mark.parametrize(("text", "nbytes"), [("300MB,100MB", [300_000_000, 100_000_000]), ("1.5G", [1_500_000_000])])
def test_sizes(text: str, nbytes: list[int]) -> None:
    assert parse_memory(text) == nbytes


def test_a_budget_is_in_the_document(model: Path) -> None:
    assert document(plan_for(model, 2), Budget(50, 4, 200e-6))["feasible"] is True


def test_a_ranks_file_that_is_wrong_names_the_key(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ranks\[0\]: unknown key decode_gb"):
        plan_for(model, ranks_file(tmp_path / "r.json", {"decode_gb": 3}))
    with pytest.raises(ValueError, match="memory_gb is -1"):
        plan_for(model, ranks_file(tmp_path / "r.json", {"memory_gb": -1}))


def test_files_that_cannot_be_packed_are_planned_exact(tmp_path: Path) -> None:
    path = sparse_gguf(tmp_path / "m.gguf", kind=Kind.Q2_K)
    choice = plan_for(path, 2)
    assert choice.problem.ranks[0].way.compute == "exact"
    with pytest.raises(ValueError, match="can't be computed packed"):
        plan_for(path, 2, compute="packed")


def test_a_rank_at_a_tenth_never_lowers_the_rate(tmp_path: Path) -> None:
    """Four ranks, one of which may run a tenth of the time: it gets little, or nothing."""
    path = sparse_gguf(tmp_path / "m.gguf", layers=8, kv_heads=8, columns=8192)
    like = {"decode_gb_per_s": 10, "compute": "exact"}
    ranks = ranks_file(tmp_path / "r.json", like, like, {**like, "duty": 0.1, "name": "tenth"}, like, collective_us=20)
    three = plan_for(path, ranks_file(tmp_path / "three.json", like, like, like, collective_us=20), keep_all=True)
    choice = plan_for(path, ranks)
    assert choice.solution.step_s <= three.solution.step_s
    if choice.left_out:
        assert [one.name for one in choice.left_out] == ["tenth"]
    else:
        assert choice.solution.plan.columns[2] < 8192 / 8


def test_a_measured_plan_says_how_long_regions_stay_unresolved(model: Path, tmp_path: Path) -> None:
    choice = plan_for(model, ranks_file(tmp_path / "r.json", {"decode_gb_per_s": 1}, {"decode_gb_per_s": 2}))
    told = document(choice)
    assert [region["unresolved"]["unit"] for region in told["regions"]] == ["s", "s"]
    assert told["regions"][1]["unresolved"]["predicted"] == max(choice.solution.mlp)
    assert "4 operations unresolved, predicted" in "\n".join(lines(choice))


def test_a_plan_between_units_is_refused_with_the_nearest_legal_one(model: Path) -> None:
    units = read_model_file(model).units
    assert units is not None
    wished = ShardPlan((1, 3), (700, 1348), (500, 500))
    legal = nearest_legal(wished, units)
    assert legal is not None
    check_legal(legal, units, "legal.json")
    assert abs(legal.columns[0] - 700) <= max(len(unit) for unit in units.columns) / 2
    words = f"nearest legal plan has 1/3 KV-head groups and {legal.columns[0]}/{legal.columns[1]} columns"
    with pytest.raises(ValueError, match=words):
        check_legal(wished, units, "wished.json")
    with pytest.raises(ValueError, match="this file allows 4 ranks at most"):
        check_legal(ShardPlan((1, 1, 1, 1, 0), (512, 512, 512, 500, 12), (200,) * 5), units, "five.json")


def test_one_node_is_taken_where_only_all_collectives_together_cost_too_much(tmp_path: Path) -> None:
    """With three ranks each collective costs as much as with two: leaving out one alone would not help."""
    path = sparse_gguf(tmp_path / "m.gguf", layers=8, columns=8192, kv_heads=8)
    fast = {"decode_gb_per_s": 10}
    choice = plan_for(path, ranks_file(tmp_path / "r.json", fast, fast, fast, collective_us=800))
    assert choice.kept == (0,)
    assert [one.rank for one in choice.left_out] == [1, 2]
