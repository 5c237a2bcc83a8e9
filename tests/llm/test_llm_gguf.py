"""GGUF files written by the `gguf` package: header, values, layout and tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from llm_models import TEXT, byte_tokenizer, hf_model, write_gguf

import hostring
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint, gguf_name
from hostring.integrations.llm.checkpoint.gguf_tokenizer import tokenizer_from_fields
from hostring.integrations.llm.checkpoint.layout import TensorSlice, slices_of_rank
from hostring.integrations.llm.generate import load_model
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.sharded import build

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0, Kind.Q5_1]


def blocky_model(family: str, seed: int = 0) -> Any:
    """A model whose rows are whole blocks of 32, so that every matrix is quantised."""
    import transformers

    shapes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    kinds = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config, "qwen2": transformers.Qwen2Config}
    config = kinds[family](
        head_dim=8, vocab_size=400, max_position_embeddings=128, tie_word_embeddings=family == "qwen3", **shapes
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
    return model


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_gguf(blocky_model("qwen3"), tmp_path / "m.gguf", Kind.Q4_1, byte_tokenizer(400))
    checkpoint, reader = GgufCheckpoint(path), gguf.GGUFReader(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert checkpoint.fields == theirs
    assert {n: (t.shape, t.kind, t.offset) for n, t in checkpoint.tensors.items()} == {
        t.name: (tuple(int(n) for n in reversed(t.shape)), t.tensor_type, int(t.data_offset)) for t in reader.tensors
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_values_are_those_of_gguf_whatever_the_slice(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(blocky_model("qwen2"), tmp_path / "m.gguf", kind)
    want = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(tuple(int(n) for n in reversed(t.shape)))
        for t in gguf.GGUFReader(path).tensors
    }
    for world_size in (1, 3):
        checkpoint = GgufCheckpoint(path)
        plan = ShardPlan((4,), (96,), (400,)) if world_size == 1 else ShardPlan((1, 1, 2), (7, 50, 39), (1, 398, 1))
        for rank in range(world_size):
            for parts in slices_of_rank(checkpoint.config, plan, rank).values():
                for part in parts:
                    whole = want[gguf_name(part.name)]
                    rows = whole[part.rows.start : part.rows.stop]
                    cut = rows if part.columns is None else rows[:, part.columns.start : part.columns.stop]
                    np.testing.assert_array_equal(checkpoint.read(part).float().numpy(), cut)


def test_a_slice_reads_only_the_blocks_that_cover_it(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_gguf(blocky_model("qwen3"), tmp_path / "m.gguf", Kind.Q4_1))
    name, shape = "model.layers.0.mlp.down_proj.weight", (64, 96)
    for columns, blocks in ((range(0, 32), 1), (range(31, 33), 2), (range(40, 60), 1), (range(5, 5), 0)):
        before = checkpoint.bytes_read
        values = checkpoint.read(TensorSlice(name, shape, range(64), columns))
        assert values.shape == (64, len(columns))
        assert checkpoint.bytes_read - before == 64 * blocks * 20  # a Q4_1 block is 20 bytes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_model_that_was_written(
    family: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    oracle = blocky_model(family)
    path = write_gguf(oracle, tmp_path / "m.gguf", Kind.F32)
    tokens = torch.randint(0, 400, (1, 30), generator=torch.Generator().manual_seed(1))

    def logits(comm: hostring.Comm) -> torch.Tensor:
        with torch.inference_mode():
            return build(GgufCheckpoint(path), comm).decoder(tokens)

    with torch.inference_mode():
        want = oracle(tokens).logits
    got = run_ranks(1, logits)[0]
    assert (got - want).abs().max() <= 40 * torch.finfo(torch.float32).eps * want.abs().max()


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.F16], ids=lambda k: k.name)
def test_a_rank_may_hold_no_columns(kind: Kind, tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    """A measured plan gives a slow rank none of the MLP."""
    path = write_gguf(blocky_model("qwen3"), tmp_path / "m.gguf", kind)
    plan = ShardPlan((2, 2), (0, 96), (200, 200))

    def text(comm: hostring.Comm, plan: ShardPlan | None) -> Any:
        model = build(GgufCheckpoint(path), comm, plan=plan)
        rows = [
            model.step(torch.tensor([[5, 9, 2, 7]]), cache := model.new_cache()),
            model.step(torch.tensor([[3]]), cache),
        ]
        return [comm.all_gather(row[0].numpy().copy(), counts=model.plan.vocab) for row in rows]

    (want,) = run_ranks(1, lambda comm: text(comm, None))
    for got in run_ranks(2, lambda comm: text(comm, plan)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_structure_comes_from_shapes_where_metadata_is_silent(tmp_path: Path) -> None:
    config = GgufCheckpoint(write_gguf(blocky_model("qwen2"), tmp_path / "a.gguf", Kind.F32)).config
    assert (config.qkv_bias, config.qk_norm, config.tie_word_embeddings) == (True, False, False)
    config = GgufCheckpoint(write_gguf(blocky_model("qwen3"), tmp_path / "b.gguf", Kind.F32)).config
    assert (config.qkv_bias, config.qk_norm, config.tie_word_embeddings) == (False, True, True)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size) == (
        8,
        4,
        8,
        96,
    )


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(blocky_model("qwen3"), tmp_path / "m.gguf", Kind.Q4_1, byte_tokenizer(400))
    whole = path.read_bytes()
    for content, message in (
        (b"GGML" + whole[4:], "is not a GGUF file"),
        (whole[:4] + b"\x01\0\0\0" + whole[8:], "GGUF version 1"),
        (whole[:300], "the header runs past the end"),
        (whole[:-100], "reaches past the end of the file"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            GgufCheckpoint(path)


def test_an_architecture_that_is_not_covered_is_refused(tmp_path: Path) -> None:
    path = write_gguf(blocky_model("qwen3"), tmp_path / "m.gguf", Kind.F32)
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"gemma"))
    with pytest.raises(ValueError, match="GGUF architecture 'gemma' is not supported"):
        GgufCheckpoint(path)


def test_the_tokenizer_inside_is_the_one_that_was_written(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    written = byte_tokenizer(400)
    path = write_gguf(blocky_model("llama"), tmp_path / "m.gguf", Kind.F16, written)

    def read(comm: hostring.Comm) -> Any:
        return load_model(path, comm).tokenizer

    tokenizer = run_ranks(1, read)[0]
    assert tokenizer.encode(TEXT) == written.encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_ids == {written.token_to_id("<end>")}
    start, end = written.token_to_id("<start>"), written.token_to_id("<end>")
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == [start, *written.encode("user\nhi").ids, end, start]


def test_another_way_to_cut_text_is_refused() -> None:
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [], "tokenizer.ggml.merges": []}
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre 'martian' is not known; supported: gpt-2"):
        tokenizer_from_fields({**fields, "tokenizer.ggml.pre": "martian"})


def test_a_model_of_odd_rows_is_read_too(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_gguf(hf_model("llama"), tmp_path / "m.gguf", Kind.Q8_0))
    assert checkpoint.config.head_dim == 12
    assert {t.kind for t in checkpoint.tensors.values()} == {Kind.F32}
