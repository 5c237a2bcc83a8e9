"""Packed weights: ggml's products of the file's own blocks, against gguf's dequantisation; the same bits on 1, 2, 3
and 5 ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from llm_models import packable_model, write_gguf

import hostring
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.packed.cache import PackedCache
from hostring.integrations.llm.packed.decoder import PackedDecoder, units_of
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.packed.step import Steps
from hostring.integrations.llm.packed.units import folded
from hostring.integrations.llm.packed.weights import FORMATS
from hostring.integrations.llm.sharded import build

try:
    load()
except Unavailable as exc:
    pytest.skip(str(exc), allow_module_level=True)

IDS = [5, 17, 3, 250, 9, 9, 101, 42, 7, 311, 12]


class Sums:
    """Adds up over a group; where the stream is watched, a step must end with what it began with and all sums."""

    def __init__(self, comm: hostring.Comm) -> None:
        self.comm = comm

    def begin(self, x: npt.NDArray[np.float32]) -> None:
        self.stream = x.copy()

    def reduce(self, slots: npt.NDArray[np.float32], completes: Any) -> None:
        self.comm.all_reduce(slots)
        self.stream += folded(completes, slots)

    def end(self, x: npt.NDArray[np.float32]) -> None:
        np.testing.assert_array_equal(x, self.stream)


def greedy(
    path: Path, comm: hostring.Comm, n_tokens: int = 8, plan: ShardPlan | None = None, chunks: Sequence[int] = ()
) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Ids and all logits, shape (tokens + 1, vocabulary), of one rank of a group, packed."""
    checkpoint = GgufCheckpoint(path)
    units = units_of(checkpoint)
    plan = plan or units.shares(checkpoint.config, comm.world_size)
    decoder = PackedDecoder(checkpoint, plan, units, comm.rank)
    cache, steps = PackedCache(decoder.local, 256), Steps(decoder, Sums(comm))

    def whole(part: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return comm.all_gather(part[0].copy(), counts=plan.vocab) if comm.world_size > 1 else part[0].copy()

    start, logits = 0, None
    for n in [*chunks, len(IDS) - sum(chunks)]:
        logits = steps.run([(cache, IDS[start : start + n])])
        start += n
    found, rows = [], [whole(logits)]
    for _ in range(n_tokens):
        found.append(int(rows[-1].argmax()))
        rows.append(whole(steps.run([(cache, [found[-1]])])))
    return found, np.array(rows)


def exact(path: Path, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits of every position from len(IDS) - 1 on, with weights dequantised by gguf and float32 arithmetic."""
    comm = hostring.init(0, 1)
    model = build(GgufCheckpoint(path), comm, max_seq=256)
    whole = model.decoder(torch.tensor([[*IDS, *ids]]), model.new_cache())[0]
    return whole[len(IDS) - 1 :].numpy()


def distance(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("kind", [Kind[name] for name in FORMATS], ids=lambda k: k.name)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_logits_are_those_of_the_dequantised_weights(family: str, kind: Kind, tmp_path: Path) -> None:
    """Activations are rounded to blocks of 8 bits (of 16 for F16 and BF16, and in the cache): that is the difference
    allowed."""
    path = write_gguf(packable_model(family, tied=family != "qwen2"), tmp_path / "m.gguf", kind)
    ids, logits = greedy(path, hostring.init(0, 1))
    bound = 0.002 if kind in (Kind.F32, Kind.F16) else 0.01 if kind == Kind.BF16 else 0.06
    assert distance(logits, exact(path, ids)) < bound


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
def test_the_bits_do_not_depend_on_the_number_of_ranks(kv_heads: int, tmp_path: Path, run_ranks: Any) -> None:
    path = write_gguf(packable_model("qwen3", kv_heads, 64), tmp_path / "m.gguf", Kind.Q4_1)
    alone = greedy(path, hostring.init(0, 1))
    for world_size in (n for n in (2, 3, 5) if n <= kv_heads):
        for ids, logits in run_ranks(world_size, lambda comm: greedy(path, comm)):
            assert ids == alone[0]
            np.testing.assert_array_equal(logits, alone[1])


@pytest.mark.parametrize("shares", [(1, 2), (2, 1), (1, 1, 1)], ids=str)
def test_the_bits_do_not_depend_on_who_holds_what(shares: tuple[int, ...], tmp_path: Path, run_ranks: Any) -> None:
    path = write_gguf(packable_model("llama", 3, 64), tmp_path / "m.gguf", Kind.Q8_0)
    units = [len(u) for u in units_of(GgufCheckpoint(path)).columns]  # another split of the columns than of the heads
    columns = (*units[: len(shares) - 1], sum(units[len(shares) - 1 :]))
    plan = ShardPlan(shares, columns, (1, *[7] * (len(shares) - 2), 399 - 7 * (len(shares) - 2)))
    alone = greedy(path, hostring.init(0, 1))
    for ids, logits in run_ranks(len(shares), lambda comm: greedy(path, comm, plan=plan)):
        assert ids == alone[0]
        np.testing.assert_array_equal(logits, alone[1])


@pytest.mark.parametrize("chunks", [(1,) * 10, (8,), (3, 5)], ids=str)
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q6_K, Kind.F16, Kind.F32], ids=lambda k: k.name)
def test_a_prompt_in_chunks_gives_the_bits_of_the_whole(kind: Kind, chunks: tuple[int, ...], tmp_path: Path) -> None:
    path = write_gguf(packable_model("qwen2"), tmp_path / "m.gguf", kind)
    whole, cut = (greedy(path, hostring.init(0, 1), 2, chunks=c) for c in ((), chunks))
    np.testing.assert_array_equal(whole[1], cut[1])


def test_a_rank_holds_its_share_of_the_file(tmp_path: Path) -> None:
    path = write_gguf(packable_model("qwen3", 4, 256), tmp_path / "m.gguf", Kind.Q4_0)
    checkpoint = GgufCheckpoint(path)
    whole = sum(t.row_nbytes * int(np.prod(t.shape[:-1])) for t in checkpoint.tensors.values())
    vectors = sum(t.row_nbytes for t in checkpoint.tensors.values() if len(t.shape) == 1)
    units = units_of(checkpoint)
    for world_size in (1, 2, 4):
        plan = units.shares(checkpoint.config, world_size)
        held = [PackedDecoder(checkpoint, plan, units, rank).nbytes_held for rank in range(world_size)]
        assert sum(held) == whole + (world_size - 1) * vectors
        assert max(held) <= 1.1 * whole / world_size + vectors


def test_copied_columns_are_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = write_gguf(packable_model("qwen3", 2, 64), tmp_path / "m.gguf", Kind.Q5_1)
    checkpoint = GgufCheckpoint(path)
    units = units_of(checkpoint)
    decoder = PackedDecoder(checkpoint, units.shares(checkpoint.config, 2), units, 1)
    info = checkpoint.tensors["blk.1.ffn_down.weight"]
    whole = np.frombuffer(checkpoint.mapped[0], np.uint8, info.shape[0] * info.row_nbytes, info.offset)
    lines = whole.reshape(info.shape[0], info.row_nbytes)
    at = info.row_nbytes // 2
    for unit in decoder.layers[1]["mlp"].last:
        nbytes = unit.width // 32 * 24
        copied = np.ctypeslib.as_array((ctypes.c_uint8 * (info.shape[0] * nbytes)).from_address(_data(unit.tensor)))
        np.testing.assert_array_equal(copied.reshape(-1, nbytes), lines[:, at : at + nbytes])
        at += nbytes
    assert at == info.row_nbytes


def _data(tensor: int) -> int:
    from hostring.integrations.llm.packed.library import at

    return int(at(tensor).data)


def test_a_full_cache_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    path = write_gguf(packable_model("qwen3", 1, 64), tmp_path / "m.gguf", Kind.Q8_0)
    checkpoint = GgufCheckpoint(path)
    units = units_of(checkpoint)
    decoder = PackedDecoder(checkpoint, units.shares(checkpoint.config, 1), units, 0)
    cache, steps = PackedCache(decoder.local, 4), Steps(decoder, None)
    steps.run([(cache, [1, 2, 3])])
    with pytest.raises(ValueError, match="KV cache holds 4 positions, 3 are taken and 2 more are needed"):
        steps.run([(cache, [1, 2])])
    assert cache.length == 3


def test_a_wrong_product_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(packable_model("qwen3", 1, 64), tmp_path / "m.gguf", Kind.Q4_0)
    checkpoint = GgufCheckpoint(path)
    units = units_of(checkpoint)
    monkeypatch.setattr(
        "hostring.integrations.llm.packed.check.dequantize", lambda blocks, kind: 1.1 * gguf.dequantize(blocks, kind)
    )
    with pytest.raises(Unavailable, match="product of Q4_0 blocks"):
        PackedDecoder(checkpoint, units.shares(checkpoint.config, 1), units, 0)
