"""Rotary positions of checkpoints: YaRN, Llama 3's band and linear scaling, in HF fields and in GGUF metadata. The
oracle is `transformers`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_models import TOKENS, alone, close, edit, ours, small
from gguf import GGMLQuantizationType as Kind
from llm_models import LLAMA3, packable_model, write_gguf

import hostring
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.packed.model import build_packed
from hostring.integrations.llm.sharded import build

__all__ = ["alone"]

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
SCALED: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2},
    "yarn-band": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5},
    "yarn-not-truncated": {**YARN, "truncate": False, "beta_fast": 3.0, "beta_slow": 0.2},
    "yarn-no-factor": {**YARN, "factor": None},
    "yarn-one": {**YARN, "factor": 1.0},
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
}


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(TOKENS).logits
    return logits


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_scaled_positions_of_hf_directories(kind: str, name: str, tmp_path: Path, alone: hostring.Comm) -> None:
    model = small(kind, rope_parameters=SCALED[name])
    model.save_pretrained(tmp_path)
    want = logits_of(model)
    assert close(ours(tmp_path, alone), want)
    edit(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": SCALED[name]["rope_theta"]})
    assert name == "yarn-one" or not close(ours(tmp_path, alone), want)  # the scaling is seen


def test_fields_of_earlier_releases(tmp_path: Path, alone: hostring.Comm) -> None:
    model = small("qwen2", rope_parameters=YARN)
    model.save_pretrained(tmp_path)
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    edit(tmp_path, rope_parameters=None, rope_scaling=old, rope_theta=10000.0)
    assert close(ours(tmp_path, alone), logits_of(model))


def keys_of(scaled: dict[str, Any]) -> dict[str, Any]:
    """As llama.cpp's converter writes them."""
    if scaled["rope_type"] == "linear":
        return {"type": "linear", "factor": scaled["factor"]}
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    betas = {names[key]: value for key, value in scaled.items() if key in names}
    return {"type": "yarn", "factor": 4.0, "original_context_length": 16, **betas}


def write_scaled(
    model: Any, path: Path, keys: dict[str, Any], divisors: list[float] | None = None, kind: Kind = Kind.F32
) -> Path:
    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{model.config.model_type}.rope.scaling.{key}", value)
        if divisors is not None:
            writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))

    return write_gguf(model, path, kind, change=change)


@pytest.mark.parametrize("name", ["yarn", "yarn-band", "linear"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_scaled_positions_in_gguf_metadata(kind: str, name: str, tmp_path: Path, alone: hostring.Comm) -> None:
    model = small(kind, rope_parameters=SCALED[name])
    path = write_scaled(model, tmp_path / "m.gguf", keys_of(SCALED[name]))
    assert close(ours(path, alone), logits_of(model))


def test_the_attention_factor_in_gguf_comes_on_top_of_the_usual_one(tmp_path: Path, alone: hostring.Comm) -> None:
    model = small("qwen3", rope_parameters={**YARN, "attention_factor": 0.7 * (0.1 * math.log(4.0) + 1.0)})
    path = write_scaled(model, tmp_path / "m.gguf", {**keys_of(YARN), "attn_factor": 0.7})
    assert close(ours(path, alone), logits_of(model))
    with pytest.raises(ValueError, match=r"rope\.scaling\.yarn_attn_factor is 0\.5"):
        ours(write_scaled(model, path, {**keys_of(YARN), "yarn_attn_factor": 0.5}), alone)
    with pytest.raises(ValueError, match=r"rope\.scaling\.factor is missing"):
        ours(write_scaled(model, path, {"type": "yarn"}), alone)


def llama3_divisors(head_dim: int) -> list[float]:
    """As llama.cpp's converter computes them for `rope_freqs.weight`."""
    found = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * LLAMA3["rope_theta"] ** (i / head_dim)
        low, high = (
            LLAMA3["original_max_position_embeddings"] / LLAMA3[f"{end}_freq_factor"] for end in ("low", "high")
        )
        blend = (LLAMA3["original_max_position_embeddings"] / wave - LLAMA3["low_freq_factor"]) / (
            LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"]
        )
        smooth = 1 / ((1 - blend) / LLAMA3["factor"] + blend)
        found.append(1.0 if wave < high else LLAMA3["factor"] if wave > low else smooth)
    return found


def test_the_band_of_llama_3_as_a_tensor_of_a_gguf_file(tmp_path: Path, alone: hostring.Comm) -> None:
    model = small("llama", rope_parameters=LLAMA3)
    divisors = llama3_divisors(12)
    assert len(set(divisors)) > 2
    path = write_scaled(model, tmp_path / "m.gguf", {}, divisors)
    assert close(ours(path, alone), logits_of(model))


@pytest.mark.parametrize("scaled", ["yarn", "linear", "table"])
def test_packed_ranks_turn_as_exact_ones(scaled: str, tmp_path: Path, alone: hostring.Comm) -> None:
    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))
    keys = {} if scaled == "table" else {**keys_of(SCALED[scaled]), "attn_factor": 0.5}
    model = packable_model("llama", kv_heads=1)
    divisors = llama3_divisors(128) if scaled == "table" else None
    path = write_scaled(model, tmp_path / "m.gguf", keys, divisors, Kind.F16)
    tokens = TOKENS[:, :16]
    part, whole = build_packed(GgufCheckpoint(path), alone), build(GgufCheckpoint(path), alone, max_seq=64)
    with torch.inference_mode():
        got, want = (one.step(tokens, one.new_cache()) for one in (part, whole))
    assert (got - want).norm() / want.norm() < 0.002  # packed rounds activations and the cache to 16 bits
