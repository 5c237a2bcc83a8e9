"""The same for GGUF: every key and every tensor is used or refused by name; and what paths mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_models import TOKENS, alone, close, edit, ours, outcome, small
from gguf import GGMLQuantizationType as Kind
from llm_models import byte_tokenizer, save, write_gguf

import hostring
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer
from hostring.integrations.llm.checkpoint.weights import open_checkpoint

__all__ = ["alone"]

# ------------------------------------------------------------------ GGUF

GGUF_KINDS = ("qwen3", "qwen2", "llama", "smollm3")
# Keys that change nothing, or say again what the tensors say.
EQUAL = ("rope.scaling.original_context_length", "rope.scaling.finetuned", "context_length")
UNDERSTOOD = ("rope.freq_base", "attention.layer_norm_rms_epsilon", "rope.scaling.factor", "rope.scale_linear")
UNDERSTOOD += ("rope.scaling.attn_factor", "attention.sliding_window")


def gguf_keys() -> list[str]:
    found = set()
    for group in vars(gguf.Keys).values():
        if isinstance(group, type):
            texts = [v for v in vars(group).values() if isinstance(v, str)]
            found |= {text.removeprefix("{arch}.") for text in texts if text.startswith("{arch}.")}
    return [*sorted(key for key in found if "{" not in key), "rope.scale_linear", "attention.sinks", "brand.new"]


def adding(key: str, value: Any) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)

    return change


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_every_key_of_the_architecture_is_computed_or_refused_by_name(
    kind: str, tmp_path: Path, alone: hostring.Comm
) -> None:
    model = small(kind)
    with torch.inference_mode():
        want = model(TOKENS).logits
    assert close(ours(write_gguf(model, tmp_path / "base.gguf", Kind.F32), alone), want)
    silent = []
    for key in gguf_keys():
        if key in UNDERSTOOD:
            continue
        path = write_gguf(model, tmp_path / "m.gguf", Kind.F32, change=adding(f"{kind}.{key}", 3))
        got = outcome(path, alone)
        if isinstance(got, str):
            assert f"{kind}.{key} is 3" in got or (f"{kind}.{key}" in got and " 3 is not supported" in got), got
            assert "m.gguf" in got
        else:
            assert key in EQUAL, key
            assert close(got, want)
            silent.append(key)
    assert set(silent) == set(EQUAL)


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize(
    ("keys", "change"),
    [
        ({"rope.freq_base": 500.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ({"attention.layer_norm_rms_epsilon": 0.05}, {"rms_norm_eps": 0.05}),
        ({"rope.scale_linear": 4.0}, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ({"rope.scaling.factor": 4.0}, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ({"attention.sliding_window": 64}, {}),
        ({"attention.sliding_window": 0, "expert_count": 0, "attention.scale": 12**-0.5, "logit_scale": 1.0}, {}),
        ({"rope.dimension_count": 12, "attention.value_length": 12, "vocab_size": 67}, {}),
        ({"attention.head_count_kv": [2, 2], "feed_forward_length": [56, 56]}, {}),
    ],
)
def test_keys_that_are_understood_change_the_result(
    kind: str, keys: dict[str, Any], change: dict[str, Any], tmp_path: Path, alone: hostring.Comm
) -> None:
    model = small(kind, **change)

    def write(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            adding(f"{kind}.{key}", value)(writer)

    path = write_gguf(model, tmp_path / "m.gguf", Kind.F32, change=write)
    with torch.inference_mode():
        assert close(ours(path, alone), model(TOKENS).logits)


EXTRA_GGUF = {
    "blk.0.attn_q.scale": (1,),
    "blk.0.ffn_up.input_scale": (1,),
    "blk.0.post_attention_norm.weight": (48,),
    "blk.1.post_ffw_norm.weight": (48,),
    "blk.0.attn_sinks.weight": (4,),
    "blk.0.ffn_gate_inp.weight": (2, 48),
    "blk.0.ffn_gate_exps.weight": (2, 56, 48),
    "blk.0.attn_k.bias": (24,),
    "blk.1.attn_v.bias": (24,),
    "blk.0.ffn_gate.bias": (56,),
    "blk.0.ffn_down.bias": (48,),
    "blk.1.attn_output.bias": (48,),
    "blk.0.attn_norm.bias": (48,),
    "output.bias": (67,),
    "output_norm.bias": (48,),
    "token_embd_norm.weight": (48,),
    "rope_factors_long.weight": (6,),
    "rope_freqs.weight": (5,),
}


@pytest.mark.parametrize("name", EXTRA_GGUF)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_gguf_tensor_that_would_not_be_read_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor(name, np.ones(EXTRA_GGUF[name], np.float32))

    path = write_gguf(small(kind), tmp_path / "m.gguf", Kind.F32, change=add)
    stem = name.rsplit(".", 1)[0].rpartition(".")[2].removesuffix("_exps")  # each expert is named
    with pytest.raises(ValueError, match=f"{stem}") as caught:
        open_checkpoint(path)
    assert "m.gguf" in str(caught.value)


def test_rope_divisors_are_used_where_llama_cpp_uses_them(tmp_path: Path, alone: hostring.Comm) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.full(6, 4.0, np.float32))

    linear = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
    model = small("llama", **linear)  # all divisors equal: the same as a linear factor
    with torch.inference_mode():
        want = model(TOKENS).logits
    assert close(ours(write_gguf(model, tmp_path / "m.gguf", Kind.F32, change=add), alone), want)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        open_checkpoint(write_gguf(small("qwen3"), tmp_path / "q.gguf", Kind.F32, change=add))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.float64])
def test_gguf_weights_without_a_scale_are_refused(dtype: type, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.1.ffn_down.weight", np.ones((48, 56), dtype))

    path = write_gguf(small("qwen2"), tmp_path / "m.gguf", Kind.F32, change=add, without=["blk.1.ffn_down.weight"])
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_down\.weight is of format [FI]"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "without", "message"),
    [
        (None, ["blk.0.ffn_up.weight"], r"has no tensor blk\.0\.ffn_up\.weight"),
        (None, ["token_embd.weight"], r"has no tensor token_embd\.weight"),
        (None, ["blk.1.attn_norm.weight"], r"has no tensor blk\.1\.attn_norm\.weight"),
        (("llama.attention.head_count_kv", [2, 1]), (), r"head_count_kv is \[2, 1\]; expected the same number"),
        (("llama.attention.head_count", 3), (), r"attention\.head_count is 3 and .*key_length is 12, but"),
        (("llama.block_count", 0), (), "block_count is 0; expected a whole number of at least 1"),
        (("llama.rope.scaling.type", "longrope"), (), "rope scaling 'longrope' is not supported"),
        (("llama.rope.scaling.type", "linear"), (), r"rope\.scaling\.factor is missing"),
        (("general.type", "adapter"), (), r"general\.type is 'adapter'; expected 'model'"),
    ],
)
def test_gguf_errors_name_file_field_and_value(
    change: tuple[str, Any] | None, without: list[str], message: str, tmp_path: Path
) -> None:
    more = adding(*change) if change else (lambda writer: None)
    path = write_gguf(small("llama"), tmp_path / "m.gguf", Kind.F32, change=more, without=without)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(path)
    assert "m.gguf" in str(caught.value)


def test_a_mixture_of_experts_is_named_as_one(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        for part in ("gate", "up", "down"):
            writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", np.ones((2, 56, 48), np.float32))

    path = write_gguf(small("llama"), tmp_path / "m.gguf", Kind.F32, change=add, without=["blk.0.ffn_up.weight"])
    with pytest.raises(ValueError, match=r"no tensor blk\.0\.ffn_up\.weight; it has experts"):
        open_checkpoint(path)


# ------------------------------------------------------------------ paths


def test_paths_mean_what_people_mean(tmp_path: Path, alone: hostring.Comm) -> None:
    model = small("qwen3")
    with torch.inference_mode():
        want = model(TOKENS).logits
    upper = write_gguf(model, tmp_path / "M.GGUF", Kind.F32, byte_tokenizer(67))
    assert close(ours(upper, alone), want)
    assert close(ours(tmp_path, alone), want)  # the directory that holds it
    assert load_tokenizer(tmp_path).vocab_size == load_tokenizer(upper).vocab_size
    blob = tmp_path / "blob"
    upper.rename(blob)  # as in a cache
    assert close(ours(blob, alone), want)


def test_paths_that_hold_no_model_say_why(tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(ValueError, match=r"empty\.gguf is empty \(0 bytes\)"):
        open_checkpoint(empty)
    (tmp_path / "second.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"holds 2 GGUF files \(empty\.gguf, second\.gguf\); name one of them"):
        open_checkpoint(tmp_path)
    odd = tmp_path / "model.bin"
    odd.write_bytes(b"PK\3\4")
    with pytest.raises(ValueError, match=r"model\.bin is neither a GGUF file nor"):
        open_checkpoint(odd)
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    (pickles / "config.json").write_text("{}", encoding="utf-8")
    (pickles / "pytorch_model.bin").write_bytes(b"PK\3\4")
    with pytest.raises(FileNotFoundError, match=r"has 0 \.safetensors files .*\*\.bin files are not read"):
        open_checkpoint(pickles)


def test_a_gptq_directory_is_refused_by_its_method(tmp_path: Path) -> None:
    save(small("llama"), tmp_path)
    edit(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"quantization_config says that the weights are quantised \('gptq'\)"):
        open_checkpoint(tmp_path)
