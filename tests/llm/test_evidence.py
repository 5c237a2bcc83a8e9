"""A run that does not do what it claims is found out: ranks that skip reductions, or throw their results away, for
real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import in_threads

import hostring
from hostring.integrations.llm.demo.job import BUNDLED, make_job
from hostring.integrations.llm.demo.measure import measure
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer

COMMON: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "controls": False}


def run(ranks: int = 2, max_tokens: int = 6) -> dict[str, Any]:
    job = make_job(
        model=str(BUNDLED), ranks=ranks, dtypes="f32", prompts=("In the beginning",), max_tokens=max_tokens, **COMMON
    )
    result = in_threads(ranks, lambda comm: measure(job, comm, lambda kind, value: None))[0]
    assert isinstance(result, dict)
    return result


def skipped(reducer: HiddenReducer, partial: Any) -> Any:
    """What a prompt's reduction is without one."""
    return partial


def thrown_away(reducer: HiddenReducer) -> Any:
    """A decode step's reduction whose result nobody sees."""
    reducer.comm.all_reduce(reducer.row.clone().numpy())
    return reducer.row


def replaced(reducer: HiddenReducer) -> Any:
    """The same wrong values on every rank, after a reduction that did run."""
    reducer.comm.all_reduce(reducer.row.numpy())
    return reducer.row.zero_()


def row_skipped(reducer: HiddenReducer) -> Any:
    return reducer.row


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_honest_run_is_valid(ranks: int) -> None:
    assert run(ranks)["faults"] == []


@pytest.mark.parametrize(
    ("method", "bypass", "expected"),
    [
        ("__call__", skipped, "collectives over the prompt counted, 9 expected"),
        ("__call__", skipped, "steps computed with something else"),
        ("reduce_row", row_skipped, "collectives per token counted, 9 expected"),
        ("reduce_row", thrown_away, "steps computed with something else"),
        ("reduce_row", thrown_away, "rank 1 has reduced other activations than rank 0"),
        ("reduce_row", replaced, "steps computed with something else"),
    ],
)
def test_every_bypass_on_all_ranks_is_named(
    method: str, bypass: Callable[..., Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HiddenReducer, method, bypass)
    found = run()["faults"]
    assert any(expected in fault for fault in found), found


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_one_rank_that_throws_the_prompts_reductions_away_is_named(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traffic is that of an honest run, and one token has no decode step."""
    honest = HiddenReducer.__call__

    def cheating(reducer: HiddenReducer, partial: Any) -> Any:
        if isinstance(reducer.comm, hostring.Comm) and reducer.comm.rank == 1:
            kept = partial.clone()
            honest(reducer, partial)
            return kept
        return honest(reducer, partial)

    monkeypatch.setattr(HiddenReducer, "__call__", cheating)
    found = run(3, max_tokens)["faults"]
    assert any(fault.startswith("rank 1: 1 steps computed with something else") for fault in found), found
    assert not any(fault.startswith(("rank 0", "rank 2")) for fault in found), found
