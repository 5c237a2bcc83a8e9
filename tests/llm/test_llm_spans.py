"""What crosses between ranks, and how much happens in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from llm_models import hf_model, save

import hostring
from hostring.integrations.llm.generate import load_model
from hostring.integrations.llm.spans import boundary_bytes, measure_spans

Ranks = Callable[..., list[Any]]


def test_every_layer_has_two_spans_of_several_operations(tmp_path: Path, run_ranks: Ranks) -> None:
    save(hf_model("llama"), tmp_path)

    def run(comm: hostring.Comm) -> Any:
        model = load_model(tmp_path, comm).sharded
        spans = measure_spans(model, [1, 2, 3], steps=3)
        assert model.reducer.comm is comm
        return spans

    for spans in run_ranks(2, run):
        assert [(s.layer, s.region) for s in spans] == [(i, r) for i in range(3) for r in ("attention", "mlp")]
        attention, mlp = spans[2].operations, spans[3].operations
        # norm, qkv, rotation, cache, attention and projection; norm, gate and up, SiLU, product and down.
        assert 10 <= attention <= 25
        assert 6 <= mlp <= 15
        assert attention > mlp
        assert {s.operations for s in spans[2:] if s.region == "attention"} == {attention}
        assert all(0 < s.seconds < 1 for s in spans)


def test_a_split_embedding_has_no_spans(tmp_path: Path, run_ranks: Ranks) -> None:
    save(hf_model("llama"), tmp_path)

    def run(comm: hostring.Comm) -> None:
        with pytest.raises(ValueError, match="replicate_embedding=True"):
            measure_spans(load_model(tmp_path, comm, replicate_embedding=False).sharded, [1])
        comm.barrier()  # the first rank to raise must not take the group down under the other

    run_ranks(2, run)


def test_the_byte_formula_gives_the_figures_of_the_design() -> None:
    assert boundary_bytes(8192, 1, itemsize=2) == 2 * 16 * 1024
    assert boundary_bytes(8192, 1, 32, itemsize=2) == 2 * 512 * 1024
    assert boundary_bytes(8192, 93, itemsize=2) == pytest.approx(3e6, rel=0.02)


@pytest.mark.parametrize(("n_tokens", "sent"), [(1, {16 * 1024}), (32, {512 * 1024, 768 * 1024})])
def test_a_bf16_hidden_state_is_that_many_bytes_on_the_wire(n_tokens: int, sent: set[int], run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> tuple[int, int]:
        x = np.full((n_tokens, 8192), comm.rank + 1, ml_dtypes.bfloat16)
        before = comm.counters.payload_sent
        comm.all_reduce(x)
        assert (x == 3).all()
        return comm.counters.payload_sent - before, comm.expected_payload("all_reduce", x.size, "bfloat16")

    for counted, expected in run_ranks(2, run, topology="mesh"):
        assert counted == expected
        assert counted in sent  # two-shot sends half of the contribution in 16 bits and half of the sum in 32


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_prompt_crosses_as_the_formula_says(world_size: int, tmp_path: Path, run_ranks: Ranks) -> None:
    save(hf_model("qwen3-tied"), tmp_path)

    def run(comm: hostring.Comm) -> list[tuple[int, int]]:
        model = load_model(tmp_path, comm).sharded
        found = []
        for n_tokens in (1, 7, 20):
            before, cache = comm.counters.payload_sent, model.new_cache()
            model.step(torch.arange(n_tokens)[None], cache)
            expected = 2 * 3 * comm.expected_payload("all_reduce", n_tokens * 60)
            found.append((comm.counters.payload_sent - before, expected))
        return found

    for found in run_ranks(world_size, run, topology="mesh"):
        for n_tokens, (counted, expected) in zip((1, 7, 20), found, strict=True):
            assert counted == expected
            # One-shot sends the state to every other rank; two-shot sends 2(N-1)/N of it, up to uneven chunks.
            whole = boundary_bytes(60, 3, n_tokens)
            assert counted == (world_size - 1) * whole or counted == pytest.approx(
                2 * (world_size - 1) / world_size * whole, rel=0.1
            )
