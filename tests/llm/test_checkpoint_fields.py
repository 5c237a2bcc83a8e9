"""Whatever a checkpoint says is either computed as `transformers` computes it, or refused by name before weights are
read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from llm_models import LLAMA3, byte_tokenizer, save, write_gguf
from safetensors.torch import load_file, save_file

import hostring
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.sharded import build

KINDS = {
    "qwen3": transformers.Qwen3Config,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
}
BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOKENS = torch.randint(0, 67, (1, 20), generator=torch.Generator().manual_seed(4))

# Other values of fields whose kind of value doesn't say enough.
CHANGES: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "relu", "swish"],
    "num_attention_heads": [8],
    "num_key_value_heads": [4, 1, None],
    "head_dim": [8, None],
    "hidden_size": [64],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        LLAMA3,
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ],
    "rope_theta": [777.0],
    "rope_scaling": [{"type": "linear", "factor": 4.0}, {"type": "yarn", "factor": 4.0}],
    "sliding_window": [4],
    "use_sliding_window": [True],
    "layer_types": [["full_attention", "sliding_attention"]],
    "pretraining_tp": [2],
    "dtype": ["float16"],
    "quantization_config": [{"quant_method": "fp8", "weight_block_size": [128, 128]}],
    "partial_rotary_factor": [0.5],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "problem_type": ["regression"],
    "architectures": [["Other"]],
    "rms_norm_eps": [0.05],
    "max_position_embeddings": [128],
    "num_experts": [8],
    "attention_multiplier": [0.5],
    "logits_scaling": [2.0],
    "mlp_bias": [True],
    "attention_bias": [True],
    "final_logit_softcapping": [30.0],
}
ALONGSIDE = {"use_sliding_window": {"max_window_layers": 0, "sliding_window": 4}, "layer_types": {"sliding_window": 4}}
NOT_SAID = ("model_type", "transformers_version", "_name_or_path", "return_dict")  # without dicts, transformers fails


def fields_of(kind: str) -> list[str]:
    return sorted({*KINDS[kind](**BASE).to_dict(), *CHANGES} - set(NOT_SAID))


def other_values(kind: str, field: str) -> list[Any]:
    if field in CHANGES:
        return CHANGES[field]
    value = KINDS[kind](**BASE).to_dict().get(field)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 8 if isinstance(value, int) else value + 0.25]
    return [3] if value is None else []


def random_model(config: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
    return model


@pytest.fixture
def alone() -> Iterator[hostring.Comm]:
    with hostring.init(0, 1) as comm:
        yield comm


@torch.inference_mode()
def ours(path: Path, comm: hostring.Comm) -> torch.Tensor:
    logits: torch.Tensor = build(open_checkpoint(path), comm, max_seq=64).decoder(TOKENS)
    return logits


def outcome(path: Path, comm: hostring.Comm) -> torch.Tensor | str:
    """Logits, or why there are none."""
    try:
        return ours(path, comm)
    except ValueError as exc:
        return str(exc)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got - want).abs().max() <= 40 * torch.finfo(torch.float32).eps * want.abs().max())


def edit(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **fields}), encoding="utf-8")


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind in KINDS for field in fields_of(kind)])
def test_every_field_is_computed_or_refused_by_name(
    kind: str, field: str, tmp_path: Path, alone: hostring.Comm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for n, value in enumerate(other_values(kind, field)):
        said = {field: value, **ALONGSIDE.get(field, {})}
        path, want = tmp_path / str(n), None
        try:
            config = KINDS[kind](**{**BASE, **{k: v for k, v in said.items() if k != "quantization_config"}})
            model = random_model(config)
            with torch.inference_mode():
                want = model(TOKENS, return_dict=True).logits
        except Exception:  # transformers has no such model: ours must say so
            model = random_model(KINDS[kind](**BASE))
        if value is None and want is None:
            continue  # here, a null is a field that is not there
        model.save_pretrained(path)
        edit(path, **said)
        got = outcome(path, alone)
        if isinstance(got, str):
            assert field in got, (value, got)
            assert str(path) in got
            continue
        assert want is not None, f"{field}={value} loads here, and not in transformers"
        assert close(got, want), f"{field}={value} gives other logits than transformers"


def test_mistakes_of_the_generator_would_be_seen(tmp_path: Path, alone: hostring.Comm) -> None:
    """Of the values above, many must change what is computed, or nothing was tested."""
    plain = random_model(transformers.LlamaConfig(**BASE))
    with torch.inference_mode():
        want = plain(TOKENS).logits
    plain.save_pretrained(tmp_path)
    assert close(ours(tmp_path, alone), want)
    for changed in ({"rms_norm_eps": 0.05}, {"rope_theta": 777.0}):
        edit(tmp_path, **changed, rope_parameters=None)
        assert not close(ours(tmp_path, alone), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "field",
    ["model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"],
)
def test_a_missing_or_odd_field_is_named(kind: str, field: str, tmp_path: Path) -> None:
    random_model(KINDS[kind](**BASE)).save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for value in ("absent", None, "x", [], 0, -1, 2.5, True, {}):
        fields = {**whole, field: value}
        if value == "absent":
            del fields[field]
        (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        with pytest.raises(ValueError, match=field) as caught:
            open_checkpoint(tmp_path)
        assert "config.json" in str(caught.value)
        assert type(caught.value) is ValueError


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_fills_in_is_filled_in(kind: str, tmp_path: Path, alone: hostring.Comm) -> None:
    """Fields that config.json may leave out."""
    for field in ("rms_norm_eps", "rope_parameters", "hidden_act", "attention_bias", "tie_word_embeddings", "head_dim"):
        size = {"head_dim": 128} if (kind, field) == ("qwen3", "head_dim") else {}
        model = random_model(KINDS[kind](**{k: v for k, v in {**BASE, **size}.items() if k != field or size}))
        path = tmp_path / field
        model.save_pretrained(path)
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
        fields.pop(field, None)
        (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        with torch.inference_mode():
            assert close(ours(path, alone), model(TOKENS).logits), field


EXTRA = {
    "model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1),
    "model.layers.0.mlp.up_proj.SCB": torch.ones(56),
    "model.layers.1.self_attn.q_proj.weight_scale": torch.ones(1),
    "model.layers.1.self_attn.q_proj.qweight": torch.ones(3, 3, dtype=torch.int32),
    "model.layers.0.self_attn.k_proj.bias": torch.ones(24),
    "model.layers.1.self_attn.o_proj.bias": torch.ones(48),
    "model.layers.0.mlp.gate_proj.bias": torch.ones(56),
    "model.layers.0.self_attn.sinks": torch.ones(4),
    "model.layers.0.post_feedforward_layernorm.weight": torch.ones(48),
    "model.layers.2.mlp.up_proj.weight": torch.ones(56, 48),
    "lm_head.bias": torch.ones(67),
}


@pytest.mark.parametrize("name", EXTRA)
def test_a_tensor_that_would_not_be_read_is_refused(name: str, tmp_path: Path) -> None:
    random_model(transformers.LlamaConfig(**BASE)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: EXTRA[name]}, file)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_without_a_known_scale_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    random_model(transformers.LlamaConfig(**BASE)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["model.layers.1.mlp.down_proj.weight"] = state["model.layers.1.mlp.down_proj.weight"].to(dtype)
    save_file(state, file)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight is of dtype"):
        open_checkpoint(tmp_path)


def test_harmless_tensors_and_files_beside_a_model_are_passed_over(tmp_path: Path, alone: hostring.Comm) -> None:
    model = random_model(transformers.LlamaConfig(**BASE))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}, file)
    for other in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"layers.0.wq": torch.ones(2)}, tmp_path / other)
    with torch.inference_mode():
        want = model(TOKENS).logits
    assert close(ours(tmp_path, alone), want)
    assert close(ours(file, alone), want)  # the file itself
    file.rename(tmp_path / "weights.safetensors")
    assert close(ours(tmp_path, alone), want)


def test_a_head_beside_a_tied_embedding_is_read(tmp_path: Path, alone: hostring.Comm) -> None:
    model = random_model(transformers.LlamaConfig(**{**BASE, "tie_word_embeddings": False}))
    model.save_pretrained(tmp_path)
    edit(tmp_path, tie_word_embeddings=True)
    with torch.inference_mode():
        assert close(ours(tmp_path, alone), model(TOKENS).logits)


# ------------------------------------------------------------------ GGUF

GGUF_KINDS = ("qwen3", "qwen2", "llama")
# Keys that change nothing, or say again what the tensors say.
EQUAL = ("rope.scaling.original_context_length", "rope.scaling.finetuned", "context_length")
UNDERSTOOD = ("rope.freq_base", "attention.layer_norm_rms_epsilon", "rope.scaling.factor", "rope.scale_linear")


def gguf_keys() -> list[str]:
    found = set()
    for group in vars(gguf.Keys).values():
        if isinstance(group, type):
            texts = [v for v in vars(group).values() if isinstance(v, str)]
            found |= {text.removeprefix("{arch}.") for text in texts if text.startswith("{arch}.")}
    return [*sorted(key for key in found if "{" not in key), "rope.scale_linear", "attention.sinks", "brand.new"]


def small(kind: str, **change: Any) -> Any:
    return random_model(KINDS[kind](**{**BASE, **change}))


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
    stem = name.rsplit(".", 1)[0].rpartition(".")[2]
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
        (("llama.rope.scaling.type", "yarn"), (), "rope scaling 'yarn' is not supported"),
        (("llama.rope.scaling.type", "linear"), (), r"rope\.scaling\.factor is missing"),
        (("split.count", 3), (), r"part 1 of 3 of a split model .*gguf-split --merge"),
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
    with pytest.raises(ValueError, match=r"no tensor blk\.0\.ffn_up\.weight; it is a mixture of experts"):
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
