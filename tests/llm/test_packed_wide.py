"""Packed ranks: steps of many rows, whose matrices are dequantised one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from llm_models import packable_model, write_gguf

import hostring
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.packed.dequantise import Dequantiser
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.packed.memory import Arena
from hostring.integrations.llm.packed.model import build_packed
from hostring.integrations.llm.packed.wide import MIN_WIDE_CHUNK, MIN_WIDE_ROWS
from hostring.integrations.llm.sharded import build

try:
    load()
except Unavailable as exc:
    pytest.skip(str(exc), allow_module_level=True)

LONG = [int(n) for n in np.random.default_rng(1).integers(0, 400, 2 * MIN_WIDE_ROWS + 3)]
OTHER = [int(n) for n in np.random.default_rng(2).integers(0, 400, MIN_WIDE_ROWS)]
ROUNDED_HEAD = 0.01  # only the head still rounds its input to blocks of 8 bits, and the cache holds float16


def whole(model: LocalModel, logits: torch.Tensor) -> np.ndarray[Any, Any]:
    parts = [np.asarray(row.numpy()).copy() for row in logits]
    return np.array([model.comm.all_gather(part, counts=model.plan.vocab) for part in parts])


def run_steps(model: LocalModel) -> list[np.ndarray[Any, Any]]:
    """A long prompt; more of it beside a long and a short prompt; single rows of all; a chunk beside one of them."""
    first, second, third = (model.new_cache() for _ in range(3))
    steps = [
        [(first, LONG)],
        [(first, [7, 8, 9]), (second, OTHER), (third, [5])],
        [(first, [1]), (second, [2]), (third, [3])],
        [(third, LONG[:MIN_WIDE_CHUNK]), (first, [4])],
    ]
    return [whole(model, model.step_rows(step)) for step in steps]


def distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_rows_give_the_logits_of_the_dequantised_weights(
    world_size: int, family: str, tmp_path: Path, run_ranks: Any
) -> None:
    path = write_gguf(packable_model(family, tied=family != "qwen2"), tmp_path / "m.gguf", Kind.Q4_1)
    wanted = run_steps(build(GgufCheckpoint(path), hostring.init(0, 1), max_seq=128))
    alone = run_steps(build_packed(GgufCheckpoint(path), hostring.init(0, 1), max_seq=128))

    def run(comm: hostring.Comm) -> list[np.ndarray[Any, Any]]:
        return run_steps(build_packed(GgufCheckpoint(path), comm, max_seq=128))

    for found in run_ranks(world_size, run):
        for mine, same, exact in zip(found, alone, wanted, strict=True):
            np.testing.assert_array_equal(mine, same)  # on any number of ranks
            rounded = exact.shape[0] == 3 and exact is wanted[2]  # single rows round activations in every layer
            assert distance(mine, exact) < (0.06 if rounded else ROUNDED_HEAD)


def test_the_sums_of_many_rows_are_counted_and_checked(tmp_path: Path, run_ranks: Any) -> None:
    path = write_gguf(packable_model("qwen3"), tmp_path / "m.gguf", Kind.Q8_0)

    def run(comm: hostring.Comm) -> tuple[int, int, int, int]:
        model = build_packed(GgufCheckpoint(path), comm, max_seq=128, hash_activations=True)
        before = comm.counters.snapshot()
        model.step_rows([(model.new_cache(), LONG)])
        after, expected = comm.counters.snapshot(), model.forward.reduced_elements
        sent = after["payload_sent"] - before["payload_sent"]
        assert model.reducer.audit is not None
        assert model.reducer.audit.wrong_steps == 0
        nbytes = sum(comm.expected_payload("all_reduce", len(LONG) * n, "float32") for n in expected)
        return sent, nbytes, after["calls"]["all_reduce"], len(expected)

    for sent, nbytes, calls, reductions in run_ranks(3, run):
        assert sent == nbytes > 0
        assert calls == reductions == 4


def test_many_rows_and_few_differ_only_where_bits_are_not_promised(tmp_path: Path) -> None:
    path = write_gguf(packable_model("qwen3"), tmp_path / "m.gguf", Kind.Q8_0)
    fast, slow = (
        run_steps(build_packed(GgufCheckpoint(path), hostring.init(0, 1), max_seq=128, batch_invariant=promised))
        for promised in (False, True)
    )
    assert 0 < distance(fast[0], slow[0]) < 0.06


def test_what_does_not_fit_is_refused_before_a_cache_changes(tmp_path: Path) -> None:
    path = write_gguf(packable_model("qwen3"), tmp_path / "m.gguf", Kind.Q8_0)
    model = build_packed(GgufCheckpoint(path), hostring.init(0, 1), max_seq=len(LONG) - 1)
    cache = model.new_cache()
    with pytest.raises(ValueError, match="KV cache holds"):
        model.step(torch.tensor([LONG]), cache)
    assert cache.length == 0


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_1, Kind.Q8_0], ids=lambda k: k.name)
def test_matrices_are_those_of_gguf(kind: Kind, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostring.integrations.llm.packed.dequantise.MIN_PART", 64)
    values = np.random.default_rng(0).standard_normal((7, 64), np.float32)
    blocks = np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(7, -1)
    ggml, arena = load(), Arena(load())
    stored = arena.array(blocks.shape, np.uint8)
    stored[:] = blocks
    tensor = arena.place(ggml.new_tensor_2d(arena.context(1), int(kind), 64, 7), stored)
    wanted = gguf.dequantize(blocks, kind)
    matrices = Dequantiser(ggml, threads)
    np.testing.assert_array_equal(matrices.matrix(tensor).numpy(), wanted)
    np.testing.assert_array_equal(matrices.rows(tensor, np.array([6, 0, 6], np.int32)).numpy(), wanted[[6, 0, 6]])


def test_the_logits_of_every_row_are_those_of_each_step_that_ends_there(tmp_path: Path) -> None:
    path = write_gguf(packable_model("llama"), tmp_path / "m.gguf", Kind.Q4_1)
    model = build_packed(GgufCheckpoint(path), hostring.init(0, 1), max_seq=128)
    every = model.step_rows([(model.new_cache(), LONG)], every=True).clone()
    assert every.shape[0] == len(LONG)
    for stop in (MIN_WIDE_ROWS, len(LONG) - 1, len(LONG)):
        last = model.step_rows([(model.new_cache(), LONG[:stop])])[0]
        np.testing.assert_allclose(every[stop - 1].numpy(), last.numpy(), atol=0.02)
