"""Ranks that hold the whole model divide the rows of a prompt, and write what one rank writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo_jobs import job, measured
from serving_ranks import ask, served

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.compute import stay
from hostring.integrations.llm.conversation import Conversation
from hostring.integrations.llm.demo.job import BUNDLED, make_job
from hostring.integrations.llm.evidence.run import evidence
from hostring.integrations.llm.rows.plan import RowPlan, asks_for_rows, row_plan

TOKENS = 12
PROMPT = "In the beginning God created the heaven and the earth"
JOB: dict[str, Any] = {
    "model": None, "ranks": 2, "dtypes": "float32", "prompts": (), "max_tokens": 4, "temperature": 0.0, "top_k": 0,
    "top_p": 1.0, "seed": 0, "controls": False,
}  # fmt: skip
RunRanks = Callable[..., list[Any]]


def talk(plan: RowPlan | None, comm: hostring.Comm) -> list[Any]:
    conversation = Conversation(load_model(BUNDLED, comm, plan=plan, hash_activations=True))
    return [
        conversation.ask(prompt, max_tokens=TOKENS)
        for prompt in (PROMPT, " and then they said unto him, Come down with me to the house")
    ]


@pytest.mark.parametrize("shares", [(1.0, 1.0), (78.0, 22.0), (1.0, 3.0, 2.0)])
def test_two_turns_are_those_of_one_rank(shares: tuple[float, ...], run_ranks: RunRanks) -> None:
    (alone,) = run_ranks(1, partial(talk, None))
    plan, everyone = RowPlan(shares), run_ranks(len(shares), partial(talk, RowPlan(shares)))
    for turn, before in enumerate(alone):
        fed = before.stats.prompt_tokens - before.stats.reused_tokens
        counts = plan.counts(fed)
        assert sum(counts) == fed
        for rank, found in enumerate(turns[turn] for turns in everyone):
            stats = found.stats
            assert found.tokens == before.tokens
            assert stats.wrong_steps == 0
            assert stats.handover == {"role": "rows", "rows": counts[rank], "local_rows": TOKENS - 1}
            assert stats.collectives_per_token == stats.expected_collectives_per_token == 1
            assert stats.prefill_collectives == stats.expected_prefill_collectives == 4 + 1
            assert stats.bytes_per_token == stats.expected_bytes_per_token
            assert stats.prefill_bytes == stats.expected_prefill_bytes


@pytest.mark.parametrize("shares", [(78.0, 22.0), (1.0, 1.0, 1.0)])
def test_logits_and_caches_are_those_of_one_rank(shares: tuple[float, ...], run_ranks: RunRanks) -> None:
    """Whichever rank computed a row, every rank has its keys and values."""

    def steps(plan: RowPlan | None, comm: hostring.Comm) -> Any:
        part = load_model(BUNDLED, comm, plan=plan, max_seq=128).sharded
        cache = part.new_cache()
        found = [part.step(torch.tensor([ids]), cache).numpy().copy() for ids in (list(range(40)), [3], [5, 4, 7] * 9)]
        kept = [cache.rows(layer, 0, cache.length).clone().numpy() for layer in range(4)]
        return found, np.stack(kept)

    ((whole, kept),) = run_ranks(1, partial(steps, None))
    everyone = run_ranks(len(shares), partial(steps, RowPlan(shares)))
    for _, rows in everyone:
        np.testing.assert_allclose(rows, kept, atol=1e-4 * np.abs(kept).max())
    for n, expected in enumerate(whole):
        holder = everyone[0 if n == 1 else -1][0][n]
        np.testing.assert_allclose(holder, expected, atol=1e-4 * np.abs(expected).max())
        assert sum(found[n].size > 0 for found, _ in everyone) == 1


def test_the_demo_says_who_computed_which_rows() -> None:
    plain = job(PROMPT, dtypes=("float32",) * 2)
    divided = job(PROMPT, dtypes=("float32",) * 2, rows=(3.0, 1.0))
    assert type(divided).from_json(divided.to_json()) == divided
    result = measured(divided)
    assert result["faults"] == []
    assert result["tokens"] == measured(plain)["tokens"]
    assert result["plan"]["rows"] == {"shares": [3.0, 1.0]}
    counts = RowPlan((3.0, 1.0)).counts(result["prompt_tokens"])
    assert [one["rows"] for one in result["rows"]] == list(counts)


def test_a_server_writes_texts_at_a_time_as_one_rank_writes_them(run_ranks: RunRanks) -> None:
    prompts = (PROMPT, "And God said unto them,", "a")
    plain = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    def alone(comm: hostring.Comm) -> list[str]:
        model = load_model(BUNDLED, comm)
        return [model.generate(prompt, Sampling(), max_tokens=TOKENS).text for prompt in prompts]

    (expected,) = run_ranks(1, alone)
    with served(("float32",) * 3, how={"rows": (3.0, 1.0, 2.0)}) as serving, ThreadPoolExecutor(3) as clients:
        url = f"{serving.url}/v1/completions"
        for _ in range(2):  # the second time, what is known of a prompt is not computed again
            found = clients.map(lambda prompt: ask(url, {"prompt": prompt, **plain}), prompts)
            assert [answer["choices"][0]["text"] for _, answer, _ in found] == expected


def test_a_rank_that_comes_back_takes_its_rows_again(run_ranks: RunRanks) -> None:
    plan = RowPlan((1.0, 1.0))

    def body(comm: hostring.Comm) -> list[list[int]]:
        model, again = load_model(BUNDLED, comm, plan=plan), comm.split(0)
        assert again is not None
        with again:
            before = model.generate(PROMPT, max_tokens=TOKENS).tokens
            if comm.rank:
                model = load_model(BUNDLED, again, plan=plan)
            else:
                assert stay(model.sharded, again, False) == [False, False]
            after = model.generate(PROMPT, max_tokens=TOKENS)
            assert after.stats.handover["rows"] == after.stats.prompt_tokens // 2
            return [before, after.tokens]

    for before, after in run_ranks(2, body):
        assert before == after


def test_stages_are_not_recorded() -> None:
    with pytest.raises(ValueError, match="--plan pp=2: stages hold other layers, and aren't recorded; leave --xray"):
        make_job(**JOB, plan="pp=2", xray="run.xray")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"compute": "packed"}, "packed compute has no attention that begins at a rank's own rows"),
        ({"same_bits": True}, "same bits can't be promised with --plan rows"),
        ({"compile": "on"}, "torch can't compile attention that waits for other ranks"),
        ({"xray": "run.xray"}, "--plan rows has no sums to record; leave --xray"),
        ({"speculate": "lookup"}, "--plan rows has logits of last rows only; leave --speculate, --draft"),
    ],
)
def test_what_rows_have_not_is_refused_by_name(options: dict[str, Any], refusal: str, run_ranks: RunRanks) -> None:
    with pytest.raises(ValueError, match=refusal):
        make_job(**JOB, plan="rows", **options)
    if "compute" in options or "same_bits" in options or "compile" in options:

        def body(comm: hostring.Comm) -> str:
            with pytest.raises(ValueError, match=refusal) as caught:
                load_model(BUNDLED, comm, plan=RowPlan((1.0, 1.0)), **(options if comm.rank else {}))
            return str(caught.value)

        first, second = run_ranks(2, body)
        assert first == f"rank 1: {second}"


def test_guesses_are_refused_before_a_row_is_computed(run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> None:
        part = load_model(BUNDLED, comm, plan=RowPlan((1.0, 1.0))).sharded
        cache = part.new_cache()
        with pytest.raises(ValueError, match="logits of last rows only; don't speculate"):
            part.step_rows([(cache, [1, 2, 3, 4])], True)
        assert cache.length == 0

    run_ranks(2, body)


def test_evidence_of_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="evidence of a run with --plan rows is not built"):
        evidence(make_job(**JOB, plan="rows"), tmp_path / "out", (8,), 1, "hostring evidence", print)


@pytest.mark.parametrize(
    "text", ["rows,pp=2", "pp=2,rows", "rows,context=2", "context=2,rows", "rows,prefill=0,decode=1",
             "prefill=0,decode=1,rows", "rows,experts=place"],
)  # fmt: skip
def test_rows_beside_another_division_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the plan {text!r}: expected")):
        make_job(**JOB, plan=text)


def test_what_cannot_be_is_refused(run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> None:
        with pytest.raises(ValueError, match="other shares of rows"):
            load_model(BUNDLED, comm, plan=RowPlan((1.0, 2.0) if comm.rank else (2.0, 1.0)))
        with pytest.raises(ValueError, match="3 shares of rows for 2 ranks"):
            load_model(BUNDLED, comm, plan=RowPlan((1.0, 1.0, 1.0)))

    run_ranks(2, body)
    assert (
        make_job(**JOB, plan="rows").compute == "exact"
    )  # also of the run on one rank, with which tokens are compared
    three = make_job(**{**JOB, "ranks": None, "dtypes": "f32,f32,f16"}, plan="rows")
    assert three.rows == (1.0,) * 3
    assert not asks_for_rows("rows.json")  # a file
    assert row_plan("rows", 3) == RowPlan((1.0,) * 3)
    assert row_plan("rows=78/22") == RowPlan((78.0, 22.0))
    for text, ranks, error in (
        ("rows=1/0", 2, "leave a rank without rows"),
        ("rows=1/2", 3, "2 shares of rows for 3 ranks"),
        ("rows=a", 2, "expected rows, or a share"),
        ("rows=1..2/3", 2, "no numbers"),
    ):
        with pytest.raises(ValueError, match=re.escape(error)):
            row_plan(text, ranks)
