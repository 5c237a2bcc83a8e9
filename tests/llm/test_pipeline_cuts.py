"""What a pipeline promises on long contexts, with more ranks than KV heads, with a compiled stage, and on a real
model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_models import packable_model, save

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.model.tensor_parallel import gather_logits
from hostring.integrations.llm.pipeline.stages import StagePlan, stage_plan

PROMPT, TOKENS = "In the beginning", 12
REAL = Path(os.environ.get("HOSTRING_TEST_GGUF", ""))
REAL_PROMPT, REAL_TOKENS = "What is the capital of France?", 64
RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with room for more positions than it was trained on."""
    path = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(BUNDLED, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 4200
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ["pp=3", pytest.param("pp=2,tp=2", marks=pytest.mark.slow)])
def test_a_token_costs_a_boundary_as_many_bytes_after_4000_as_after_100(
    text: str, long_model: Path, run_ranks: RunRanks
) -> None:
    config = open_checkpoint(long_model).config
    plan = stage_plan(text, config)
    bytes_of_a_row = 4 * config.hidden_size + 64

    def body(comm: hostring.Comm) -> list[int]:
        part = load_model(long_model, comm, plan=plan).sharded
        cache, crossed, found = part.new_cache(), part.forward.boundaries, []
        for length in (100, 4000):
            for chunk in torch.arange(cache.length, length).split(500):
                part.step((chunk % 1000)[None], cache)
            before = crossed.nbytes_sent
            part.step(torch.tensor([[7]]), cache)
            found.append(crossed.nbytes_sent - before)
        return found

    for rank, found in enumerate(run_ranks(plan.world_size, body, timeout=60.0)):
        stage = plan.of_rank(rank)
        sends = rank == stage.ranks.start and not stage.is_last
        assert found == [bytes_of_a_row * sends] * 2


@pytest.mark.parametrize("text", ["pp=2,tp=3", "pp=1,tp=6"])
def test_six_ranks_run_a_model_with_three_kv_heads(text: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    path = save(packable_model("qwen3", 3, 64), tmp_path)

    def tokens(plan: StagePlan | None, comm: hostring.Comm) -> list[int]:
        return load_model(path, comm, plan=plan).generate(list(range(5, 15)), max_tokens=TOKENS).tokens

    ((alone),) = run_ranks(1, partial(tokens, None))
    config = open_checkpoint(path).config
    assert config.num_key_value_heads == 3
    assert run_ranks(6, partial(tokens, stage_plan(text, config, 6))) == [alone] * 6


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("compiling", [0, 1])
def test_one_stage_compiles_and_one_does_not(compiling: int, run_ranks: RunRanks) -> None:
    """Traced and run by dynamo, without a C++ compiler."""
    plan = stage_plan("pp=2", open_checkpoint(BUNDLED).config, 2)

    def body(plan: StagePlan | None, comm: hostring.Comm) -> Any:
        compiled = "eager" if plan and comm.rank == compiling else False
        model = load_model(BUNDLED, comm, plan=plan, compile=compiled)
        return model.generate(PROMPT, Sampling(), max_tokens=TOKENS).tokens, model.sharded.forward.compiled

    ((alone, _),) = run_ranks(1, partial(body, None))
    results = run_ranks(2, partial(body, plan), deadline=400.0, timeout=300.0)
    assert results == [(alone, rank == compiling) for rank in range(2)]


@cache
def real_of_one_rank(dtype: str, compute: str) -> Any:
    with hostring.init(0, 1) as comm:
        return real_figures(None, (dtype,), (compute,), comm)


def real_figures(plan: StagePlan | None, dtypes: tuple[str, ...], ways: tuple[str, ...], comm: hostring.Comm) -> Any:
    """Greedy tokens, and all logits after the prompt on the head rank."""
    torch.set_num_threads(1)
    dtype, way = dtypes[comm.rank % len(dtypes)], ways[comm.rank % len(ways)]
    model = load_model(REAL, comm, plan=plan, max_seq=256, dtype=dtype, compute=way)
    part = model.sharded
    ids = model.tokenizer.chat([{"role": "user", "content": REAL_PROMPT}])
    logits = gather_logits(comm, part.step(torch.tensor([ids]), part.new_cache()), part.plan)
    return model.generate(ids, Sampling(), max_tokens=REAL_TOKENS).tokens, logits


def cosine(a: Any, b: Any) -> float:
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not REAL.name, reason="HOSTRING_TEST_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf")
@pytest.mark.parametrize(
    ("text", "dtype", "way"),
    [
        ("pp=2", "float32", "exact"),
        ("pp=2,layers=5/25", "float32", "exact"),
        ("pp=3", "float32", "exact"),
        ("pp=3,layers=1/20/9", "bfloat16", "exact"),
        ("pp=2", "float16", "exact"),
        ("pp=2,tp=2", "float32", "exact"),
        ("pp=2,tp=3", "float32", "exact"),
        ("pp=2,tp=2", "float32", "packed"),
        ("pp=3", "float32", "packed"),
    ],
)
def test_stages_of_a_real_model_write_what_one_rank_writes(
    text: str, dtype: str, way: str, run_ranks: RunRanks
) -> None:
    plan = stage_plan(text, open_checkpoint(REAL).config)
    tokens, logits = real_of_one_rank(dtype, way)
    results = run_ranks(plan.world_size, partial(real_figures, plan, (dtype,), (way,)), deadline=400.0, timeout=100.0)
    assert [found for found, _ in results] == [tokens] * plan.world_size
    assert round(cosine(results[0][1], logits), 6) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not REAL.name, reason="HOSTRING_TEST_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf")
@pytest.mark.parametrize(
    ("dtypes", "ways"),
    [(("float32", "bfloat16"), ("exact",)), (("float32",), ("packed", "exact")), (("float16",), ("exact", "packed"))],
)
def test_unlike_stages_of_a_real_model_agree(
    dtypes: tuple[str, ...], ways: tuple[str, ...], run_ranks: RunRanks
) -> None:
    """All ranks have one text. Packed stages round activations to 8 bits, so it may be another one than in float32."""
    plan = stage_plan("pp=2", open_checkpoint(REAL).config)
    _, logits = real_of_one_rank("float32", "exact")
    first, second = run_ranks(2, partial(real_figures, plan, dtypes, ways), deadline=400.0, timeout=100.0)
    assert first[0] == second[0]
    assert cosine(first[1], logits) > 0.99
