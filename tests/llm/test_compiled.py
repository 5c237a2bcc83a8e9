"""A rank that compiles its layers beside one that doesn't: each chooses for itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.demo.job import BUNDLED, make_job

PROMPT, TOKENS = "In the beginning", 12


def generated(compiling: int | None, backend: str, comm: hostring.Comm) -> Any:
    """On every rank. `compiling`: the rank that compiles."""
    compiled = backend if comm.rank == compiling else False
    model = load_model(BUNDLED, comm, hash_activations=True, compile=compiled, compute="exact")
    comm.barrier(timeout=max(100.0, comm.timeout))
    found = model.generate(PROMPT, Sampling(), max_tokens=TOKENS)
    return found.tokens, found.stats.activation_sha256, found.stats.wrong_steps, model.sharded.forward.compiled


def generated_in_a_process(compiling: int | None, backend: str, comm: hostring.Comm) -> Any:
    warnings.simplefilter("ignore")  # of torch's compiler
    torch.set_num_threads(1)
    return generated(compiling, backend, comm)


@pytest.fixture(scope="module")
def eager() -> list[int]:
    with hostring.init(0, 1) as comm:
        return load_model(BUNDLED, comm).generate(PROMPT, max_tokens=TOKENS).tokens


def check(outcomes: list[tuple[str, Any]], compiling: int, eager: list[int]) -> None:
    assert [kind for kind, _ in outcomes] == ["ok"] * len(outcomes), outcomes
    results = [value for _, value in outcomes]
    assert [compiled for *_, compiled in results] == [rank == compiling for rank in range(len(results))]
    assert all(tokens == eager for tokens, *_ in results)
    assert len({sha for _, sha, *_ in results}) == 1
    assert all(wrong == 0 for _, _, wrong, _ in results)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_one_rank_compiles_and_one_does_not(eager: list[int], run_ranks: Callable[..., list[Any]]) -> None:
    """Traced and run by dynamo, without a C++ compiler."""
    results = run_ranks(2, partial(generated, 1, "eager"), timeout=100.0)
    check([("ok", result) for result in results], 1, eager)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("compiling", [0, 1])
def test_one_process_compiles_and_one_does_not(
    compiling: int, eager: list[int], run_processes: Callable[..., list[tuple[str, Any]]]
) -> None:
    check(run_processes(2, partial(generated_in_a_process, compiling, "eager"), deadline=150.0), compiling, eager)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_rank_compiles_to_machine_code(
    eager: list[int], run_processes: Callable[..., list[tuple[str, Any]]]
) -> None:
    check(run_processes(2, partial(generated_in_a_process, 1, "inductor"), deadline=800.0, timeout=700.0), 1, eager)


def test_the_command_line_says_which_ranks_compile() -> None:
    common: dict[str, Any] = {
        "model": None, "prompts": (), "max_tokens": 8, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0,
        "controls": False,
    }  # fmt: skip
    job = make_job(ranks=2, dtypes=None, compile="off,on", **common)
    assert [job.compile_of(rank) for rank in range(2)] == [False, "inductor"]
    assert job.compiles
    assert make_job(ranks=3, dtypes=None, compile="aot_eager", **common).compile == ("aot_eager",) * 3
    for nothing in (None, "off"):
        assert not make_job(ranks=2, dtypes=None, compile=nothing, **common).compiles
    with pytest.raises(ValueError, match="3 choices of --compile for 2 ranks; name one for all, or one per rank"):
        make_job(ranks=2, dtypes=None, compile="on,off,on", **common)
