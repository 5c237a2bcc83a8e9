"""Guessed tokens in the demo and behind HTTP."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving_ranks import ask, served

import hostring
from hostring.integrations.llm.demo.job import BUNDLED, Job, make_job
from hostring.integrations.llm.demo.rank_model import RankModel
from hostring.integrations.llm.speculation.depth import Depth

Ranks = Callable[..., list[Any]]


def demo_job(**how: Any) -> Any:
    asked = {"prompts": ("In the beginning God created",), "max_tokens": 30, "temperature": 0.0, "top_k": 0}
    return make_job(model=None, ranks=2, dtypes="float32", **asked, top_p=1.0, seed=0, controls=False, **how)


def test_the_demo_guesses_when_told_to_and_says_what_came_of_it(run_ranks: Ranks) -> None:
    job = Job.from_json(demo_job(speculate="lookup", draft=str(BUNDLED), draft_max=3).to_json())

    def run(comm: hostring.Comm) -> tuple[Any, Any]:
        model = RankModel(job, comm)
        ids = model.ids(job.prompts[0])
        found = model.answer(ids, warm_up=False)
        model.move_to(comm)  # as after a loss: the draft stays
        return (model.model(comm, job.dtypes).speculator, found.tokens), (found.stats.as_dict(), model.reports(found))

    (own, (stats, reports)), (other, _) = run_ranks(2, run)
    assert own[0].wish == job.speculation
    assert other == (None, own[1])
    assert stats["tokens_per_step"] == 29 / stats["decode_steps"]
    for report in reports:
        assert report["bytes_per_token"] == report["expected_bytes_per_token"]


def test_a_recording_of_steps_has_no_guesses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--xray records steps of one row; leave --speculate and --draft out"):
        demo_job(speculate="lookup", xray=str(tmp_path / "x"))
    with pytest.raises(ValueError, match="--plan prefill=0,decode=1 hands over after steps of one row; leave --specul"):
        demo_job(speculate="lookup", plan="prefill=0,decode=1")
    with pytest.raises(ValueError, match="--plan prefill=0,decode=1 has no sums to record; leave --xray or --plan"):
        demo_job(xray=str(tmp_path / "x"), plan="prefill=0,decode=1")


def test_served_texts_are_those_without_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at a time, greedy and sampled, with a stop, a limit and penalties, cold and warm, in a pipeline too."""
    said = "In the beginning God created the heaven and the earth. In the beginning God"
    bodies: list[dict[str, Any]] = [
        {"prompt": said, "max_tokens": 60, "temperature": 0},
        {"prompt": said, "max_tokens": 60, "temperature": 0.7, "seed": 3, "frequency_penalty": 0.3},
        {
            "prompt": [said, "And God said, Let there be"],
            "max_tokens": 33,
            "temperature": 0,
            "stop": ["LORD"],
        },
        {"prompt": said * 3, "max_tokens": 60, "temperature": 0, "logprobs": 1},
    ]
    monkeypatch.setattr(Depth, "choose", lambda self, sequences=1: 3)
    texts = []
    for speculate, stages in (("off", ()), ("lookup", ()), ("lookup", ((2, 2), (1, 1)))):
        with served(("float32",) * 2, how={"speculate": speculate, "stages": stages}, streams=3) as server:
            with ThreadPoolExecutor() as pool:
                answers = list(pool.map(lambda body: ask(f"{server.url}/v1/completions", body)[1], bodies * 2))
            texts.append([choice["text"] for answer in answers for choice in answer["choices"]])
            totals = server.scheduler.guessing.totals
            counts = [found for answer in answers if (found := answer["usage"].get("completion_tokens_details"))]
            assert bool(counts) == bool(totals.right) == (speculate == "lookup")
            if counts:
                assert sum(found["accepted_prediction_tokens"] for found in counts) == totals.right
                assert sum(sum(found.values()) for found in counts) == totals.guessed
                assert 1 < totals.tokens_per_step < 4
                assert ask(f"{server.url}/cluster")[1]["tokens_per_step"] == totals.tokens_per_step
                assert f"hostring_right_guesses_total {float(totals.right)}" in ask(f"{server.url}/metrics")[1].decode()
    assert texts[2] == texts[1] == texts[0]
