"""Whatever config.json or safetensors files say is computed as `transformers` computes it, or refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_models import BASE, KINDS, TOKENS, alone, close, edit, ours, outcome, random_model
from llm_models import LLAMA3
from safetensors.torch import load_file, save_file

import hostring
from hostring.integrations.llm.checkpoint.weights import open_checkpoint

__all__ = ["alone"]

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
    "sliding_window": [4, 64],
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
    "no_rope_layers": [[1, 0], [0, 0], [1]],
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
