"""Several texts in a pipeline at the same time: each stage computes another group of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo_jobs import PROMPTS
from gguf import GGMLQuantizationType
from llm_models import packable_model, write_gguf
from serving_ranks import ask, served

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.compute import build_local, stay
from hostring.integrations.llm.demo.job import BUNDLED, Job
from hostring.integrations.llm.model.tensor_parallel import gather_logits
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.pipeline.stages import StagePlan, stage_plan
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.rank_part import RankPart
from hostring.integrations.llm.serve.scheduler import Scheduler
from hostring.integrations.llm.serve.serving import Serving
from hostring.integrations.llm.serve.steps import FROM_PROMPT, Plan
from hostring.integrations.llm.serve.text_request import TextRequest
from hostring.integrations.llm.serve.window import StepWindow

LONG = "And the LORD spake unto Moses, and unto Aaron, and unto the children of Israel, saying, " * 7
TEXTS = (*PROMPTS, "The earth was", "Speak unto", LONG)
TOKENS = 16


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What one rank alone writes, greedily."""
    with hostring.init(0, 1) as comm:
        model = load_model(BUNDLED, comm)
        return {prompt: model.generate(prompt, Sampling(), max_tokens=TOKENS).text for prompt in TEXTS}


def completions(serving: Serving, *prompts: str, **changes: Any) -> Any:
    body = {"prompt": prompts, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **changes}
    status, found, _ = ask(f"{serving.url}/v1/completions", body)
    assert status == 200, found
    return found["choices"]


@pytest.mark.parametrize(
    ("plan", "groups"),
    [
        ("pp=2", None),
        ("pp=3", 2),
        pytest.param("pp=3", None, marks=pytest.mark.slow),
        pytest.param("pp=3", 1, marks=pytest.mark.slow),
        pytest.param("pp=2,tp=2", None, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_one_rank_alone(
    plan: str, groups: int | None, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one text, and with more than there are slots. The stages compute other steps at the same time then."""
    computed: dict[int, list[Any]] = {}
    run = RankPart.run

    def watched(part: RankPart, mine: Any, oldest: Any) -> Any:
        computed.setdefault(part.comm.rank, []).append(mine)
        return run(part, mine, oldest)

    monkeypatch.setattr(RankPart, "run", watched)
    stages = stage_plan(plan, open_checkpoint(BUNDLED).config)
    how = {"stages": (stages.layers, stages.ranks)}
    with served(("float32",) * stages.world_size, how=how, streams=4, context=480, groups=groups) as serving:
        assert completions(serving, TEXTS[0])[0]["text"] == alone[TEXTS[0]]
        found = completions(serving, *TEXTS, *TEXTS[:2])
        assert [one["text"] for one in found] == [alone[prompt] for prompt in (*TEXTS, *TEXTS[:2])]
        (scored,) = completions(serving, TEXTS[0], echo=True, logprobs=1, max_tokens=1)
        assert len(scored["logprobs"]["tokens"]) == len(load_tokenizer(BUNDLED).encode(TEXTS[0])) + 1
    at_once = [{step for step in steps if step} for steps in zip(*computed.values(), strict=False)]
    several = sum(len(steps) > 1 for steps in at_once)
    assert several > TOKENS if groups != 1 else several == 0


def scheduler(streams: int, groups: int) -> Scheduler:
    job = Job(str(BUNDLED), ("float32",) * groups, (), 1, 0.0, 0, 1.0, 0, False)
    made = Scheduler(ServeOptions(job, streams=streams), load_tokenizer(BUNDLED), 500, 480, groups)
    made.set_state("")
    return made


def decided(head: Scheduler, plans: list[Plan], token: int) -> Plan:
    """One decision, in which all rows of the oldest step are answered with `token`."""
    from hostring.integrations.llm.serve.steps import Brought

    awaited = [row for row in (plans[0].rows if plans else ()) if row.token != FROM_PROMPT or row.positions == 3]
    brought = [Brought(row.slot, 2 * n, 1) for n, row in enumerate(awaited)]
    stacked = np.zeros((1, 2 * len(brought) + 2), np.int32)
    for part in brought:
        stacked[0, part.start : part.start + 2] = np.float32(1.0).view(np.int32), token
    plan = head.decide(stacked, brought)
    head.admissions()
    return plan


def test_texts_are_divided_into_groups_that_take_turns() -> None:
    head, written = scheduler(4, 2), list[Any]()
    head.submit([TextRequest((1, 2, 3), 50, ignore_eos=True)] * 4, [written.append] * 4)
    plans = [Plan(), Plan()]
    for _ in range(10):
        plans.append(decided(head, plans[-2:], 7))
    for before, now in itertools.pairwise(plans[5:]):
        assert len(now.rows) == 2  # rows of a group
        assert not {row.slot for row in now.rows} & {row.slot for row in before.rows}  # those are still under way
    assert {row.slot for plan in plans[-2:] for row in plan.rows} == {0, 1, 2, 3}


def test_what_comes_back_for_a_cancelled_text_is_not_given_to_the_next_in_its_slot() -> None:
    head = scheduler(1, 2)
    first, second = list[Any](), list[Any]()
    (text,) = head.submit([TextRequest((1, 2, 3), 50, ignore_eos=True)], [first.append])
    plans = [Plan(), Plan()]
    for _ in range(4):
        plans.append(decided(head, plans[-2:], 7))
    assert [len(plan.rows) for plan in plans[2:]] == [1, 0, 1, 0]
    head.cancel(text)
    head.submit([TextRequest((4, 5, 6), 2, ignore_eos=True)], [second.append])
    plans.append(decided(head, plans[-2:], 7))  # the first text's, which nobody wants now
    assert [row.positions for row in plans[-1].rows] == [3]  # the second has its slot
    generated = head.totals.generated_tokens
    plans.append(decided(head, plans[-2:], 7))
    assert head.totals.generated_tokens == generated
    plans.append(decided(head, plans[-2:], 9))
    assert head.totals.generated_tokens == generated + 1
    assert [row.token for row in plans[-1].rows] == [9]


@pytest.mark.parametrize(
    ("depth", "stages", "lags"), [(1, 3, [0, 0, 0]), (3, 3, [0, 1, 2]), (2, 3, [0, 0, 1]), (2, 4, [0, 0, 1, 1])]
)
def test_each_stage_computes_a_step_of_its_own(depth: int, stages: int, lags: list[int]) -> None:
    windows = [StepWindow(depth, stage, stages) for stage in range(stages)]
    steps = [object() for _ in range(5)]
    for step in steps:
        for window in windows:
            window.push(step)  # type: ignore[arg-type]
    assert [window.mine for window in windows] == [steps[-1 - lag] for lag in lags]
    assert {id(window.oldest) for window in windows} == {id(windows[-1].mine)}


@pytest.mark.parametrize("stages", [((1, 1), (1, 1)), ((1, 1), (2, 2)), ((2,), (3,))])
def test_a_rank_that_comes_back_promises_the_same_bits_with_those_that_stayed(
    stages: Any, tmp_path: Path, run_ranks: Any
) -> None:
    """The last rank loads anew in another group, and the others take part in each of its collectives."""
    path = write_gguf(packable_model("qwen3", 4, 64), tmp_path / "m.gguf", GGMLQuantizationType.Q4_1)
    plan = StagePlan(*stages)

    def built(comm: hostring.Comm) -> Any:
        how: dict[str, Any] = {"max_seq": 64, "hash_activations": False, "compile": False, "dtype": torch.float32}
        checkpoint, cpu = open_checkpoint(path), torch.device("cpu")
        return build_local(checkpoint, comm, "packed", cpu, plan=plan, same_bits=True, **how)[0]

    def body(comm: hostring.Comm) -> list[bool]:
        part, rebuilt = built(comm), comm.split(0)
        assert rebuilt is not None
        groups = {part.reducing, rebuilt}
        if comm.rank < comm.world_size - 1:
            stay(part, rebuilt, same_bits=True)
        else:
            part = built(rebuilt)
        logits = [gather_logits(rebuilt, part.step(torch.tensor([[5, 7, 9]]), part.new_cache()), part.plan)]
        for group in groups | {part.reducing}:
            if group is not comm:
                group.close()
        return [one is None or bool(np.isfinite(one).all()) for one in logits]

    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))
    assert run_ranks(plan.world_size, body) == [[True]] * plan.world_size
