"""Matrices that are laid out anew for ggml's fastest kernels: the same numbers, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from llm_models import packable_model, write_gguf

import hostring
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.packed.check import repacked_formats
from hostring.integrations.llm.packed.decoder import PackedDecoder, units_of
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.packed.memory import Arena
from hostring.integrations.llm.packed.model import build_packed
from hostring.integrations.llm.packed.repack import Repacker
from hostring.integrations.llm.sharded import build

try:
    ggml = load()
except Unavailable as exc:
    pytest.skip(str(exc), allow_module_level=True)

if Repacker(ggml).place(Arena(ggml), ggml.context(2), int(Kind.Q4_0), np.zeros((8, 18), np.uint8)) is None:
    pytest.skip("ggml has no kernels for repacked blocks on this CPU", allow_module_level=True)

PROMPT = [int(n) for n in np.random.default_rng(1).integers(0, 400, 37)]
VOCAB = 400  # 134 + 133 + 133 rows on three ranks: no multiples of eight


@pytest.fixture(params=[Kind.Q4_0, Kind.Q4_K], ids=lambda k: k.name)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_gguf(packable_model("qwen3"), tmp_path / "m.gguf", request.param)


def run_steps(model: LocalModel) -> list[npt.NDArray[np.float32]]:
    """A prompt; more of it beside another one; single rows of both; logits of every row."""
    first, second = model.new_cache(), model.new_cache()
    steps: list[Any] = [[(first, PROMPT)], [(first, [7, 8, 9]), (second, [5, 6])], [(first, [1]), (second, [2])]]
    found = [whole(model, model.step_rows(step)) for step in steps]
    return [*found, whole(model, model.step_rows([(model.new_cache(), PROMPT)], every=True))]


def whole(model: LocalModel, logits: torch.Tensor) -> npt.NDArray[np.float32]:
    parts = [np.asarray(row.numpy()).copy() for row in logits]
    return np.array([model.comm.all_gather(part, counts=model.plan.vocab) for part in parts])


def packed(path: Path, comm: hostring.Comm, **options: Any) -> LocalModel:
    return build_packed(GgufCheckpoint(path), comm, max_seq=128, **options)


def alone() -> hostring.Comm:
    return hostring.init(0, 1)


def distance(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_logits_are_those_of_the_plain_layout_and_of_the_dequantised_weights(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_steps(packed(path, alone()))
    exact = run_steps(build(GgufCheckpoint(path), alone(), max_seq=128))
    monkeypatch.setattr("hostring.integrations.llm.packed.decoder.repacked_formats", lambda *args: frozenset())
    plain = run_steps(packed(path, alone(), batch_invariant=True))
    for mine, theirs, wanted in zip(found, plain, exact, strict=True):
        assert 0 < distance(mine, theirs) < 0.03  # other additions, which now and then round an activation otherwise
        assert distance(mine, wanted) < 0.06


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_do_not_depend_on_the_number_of_ranks(path: Path, world_size: int, run_ranks: Any) -> None:
    wanted = run_steps(packed(path, alone()))
    for found in run_ranks(world_size, lambda comm: run_steps(packed(path, comm))):
        for mine, same in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(mine, same)


def test_the_bits_do_not_depend_on_who_holds_what(path: Path, run_ranks: Any) -> None:
    checkpoint = GgufCheckpoint(path)
    columns = [len(unit) for unit in units_of(checkpoint).columns]
    plan = ShardPlan((2, 1), (columns[0], sum(columns[1:])), (3, VOCAB - 3))
    wanted = run_steps(packed(path, alone()))
    for found in run_ranks(2, lambda comm: run_steps(packed(path, comm, plan=plan))):
        for mine, same in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(mine, same)


def test_a_promise_of_bits_takes_only_kernels_that_keep_it(path: Path) -> None:
    model = packed(path, alone(), batch_invariant=True)
    together = model.step_rows([(model.new_cache(), PROMPT)])[0].clone()
    cache = model.new_cache()
    for token in PROMPT:
        last = model.step_rows([(cache, [token])])[0]
    np.testing.assert_array_equal(last.numpy(), together.numpy())


def test_a_rank_holds_its_share_once(path: Path) -> None:
    checkpoint = GgufCheckpoint(path)
    units = units_of(checkpoint)
    whole = sum(info.row_nbytes * int(np.prod(info.shape[:-1])) for info in checkpoint.tensors.values())
    vectors = sum(info.row_nbytes for info in checkpoint.tensors.values() if len(info.shape) == 1)
    plan = units.shares(checkpoint.config, 3)
    decoders = [PackedDecoder(checkpoint, plan, units, rank) for rank in range(3)]
    assert all(decoder.repacked for decoder in decoders)
    assert sum(decoder.nbytes_held for decoder in decoders) == whole + 2 * vectors


def test_a_kernel_that_is_wrong_is_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = GgufCheckpoint(path)
    files = [np.frombuffer(mapped, np.uint8) for mapped in checkpoint.mapped]
    assert repacked_formats(ggml, files, checkpoint.tensors, False)
    place: Callable[..., Any] = Repacker.place
    monkeypatch.setattr(Repacker, "place", lambda self, a, c, kind, blocks: place(self, a, c, kind, blocks[::-1]))
    with caplog.at_level(logging.WARNING):
        assert not repacked_formats(ggml, files, checkpoint.tensors, False)
    assert "is wrong" in caplog.text


def test_ggml_says_nothing_of_its_own_doings(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    packed(path, alone())
    assert capfd.readouterr() == ("", "")
