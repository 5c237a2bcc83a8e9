"""`--plan` of demo and generate: runs have the shares of their plan; a rank with another plan is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hostring
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.compute import build_local
from hostring.integrations.llm.demo.job import BUNDLED, Job, make_job
from hostring.integrations.llm.model.shards import ShardPlan

Ranks = Callable[..., list[Any]]
SHARES = {"kv_groups": [1, 4], "columns": [100, 337], "vocab": [2000, 53]}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(SHARES), encoding="utf-8")
    return path


def given(**options: Any) -> Job:
    rest = {"max_tokens": 4, "temperature": 0.0, "top_k": 40, "top_p": 0.95, "seed": 0, "controls": False}
    return make_job(model=None, ranks=None, dtypes=None, prompts=(), **{**rest, **options})


def test_a_plan_says_how_many_ranks_there_are(plan: Path) -> None:
    job = given(plan=str(plan))
    assert job.ranks == 2
    assert job.split == ShardPlan((1, 4), (100, 337), (2000, 53))
    assert Job.from_json(job.to_json()) == job
    with pytest.raises(ValueError, match="for 2 ranks, and there are 3; start 2, or plan again"):
        make_job(model=None, dtypes=None, prompts=(), ranks=3, plan=str(plan), max_tokens=1, temperature=0.0,
                 top_k=1, top_p=1.0, seed=0, controls=False)  # fmt: skip


def test_bytes_are_levelled_before_the_ranks_start() -> None:
    plan = given(plan="bytes").split
    assert plan is not None
    assert sorted(plan.kv_groups) == [2, 3]
    assert (plan.kv_groups[0] < plan.kv_groups[1]) == (plan.columns[0] > plan.columns[1])
    assert given(plan="even").split is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_groups": [1, 3]}, "covers 4 KV-head groups; the model has 5"),
        ({"kv_groups": [0, 5]}, "leaves a rank without a KV-head group"),
        ({"vocab": "all"}, "expected lists of whole numbers"),
        ({"sha256": "0" * 64}, "were changed by hand"),
        ({"version": 9}, "is of version 9"),
    ],
)
def test_a_file_that_is_no_plan_for_this_model_is_refused(plan: Path, change: dict[str, Any], words: str) -> None:
    plan.write_text(json.dumps({**SHARES, **change}), encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        given(plan=str(plan))


def test_a_missing_plan_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make one with: hostring plan model"):
        given(plan=str(tmp_path / "none.json"))


def test_the_demo_runs_by_its_plan(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "hostring", "demo", "--plan", str(plan), "--json", str(out), "--no-controls"]
    done = subprocess.run([*command, "--max-tokens", "4"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text(encoding="utf-8"))
    assert {name: told["plan"][name] for name in SHARES} == SHARES
    assert told["plan"]["source"] == str(plan)
    assert told["faults"] == []
    assert told["bytes_held"][0] < told["bytes_held"][1]


def test_a_rank_with_another_plan_is_refused_by_name(run_ranks: Ranks) -> None:
    plans = [ShardPlan((1, 2, 2), (145, 146, 146), (684, 684, 685))] * 3
    plans[1] = ShardPlan((2, 1, 2), (145, 146, 146), (684, 684, 685))

    def load(comm: hostring.Comm) -> str:
        checkpoint = open_checkpoint(BUNDLED)
        options: dict[str, Any] = {"max_seq": None, "hash_activations": False, "compile": False}
        with pytest.raises(ValueError, match="rank 1 has another plan") as refused:
            build_local(checkpoint, comm, "exact", "cpu", plan=plans[comm.rank], **options)  # type: ignore[arg-type]
        assert checkpoint.bytes_read == 0
        return str(refused.value)

    assert len(set(run_ranks(3, load))) == 1


def test_a_rank_that_has_no_plan_among_ranks_that_have_one_is_refused(run_ranks: Ranks) -> None:
    plan = ShardPlan((1, 4), (100, 337), (2000, 53))

    def load(comm: hostring.Comm) -> None:
        options: dict[str, Any] = {"max_seq": None, "hash_activations": False, "compile": False}
        mine = plan if comm.rank else None
        with pytest.raises(ValueError, match="another plan"):
            build_local(open_checkpoint(BUNDLED), comm, "exact", "cpu", plan=mine, **options)  # type: ignore[arg-type]

    run_ranks(2, load)
