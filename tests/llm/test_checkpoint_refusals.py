"""Models that this decoder would compute wrongly are refused by name: tiny random checkpoints of `transformers`, as HF
directories and as GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from checkpoint_models import BASE, random_model

from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.model.config import ARCHITECTURES

EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 8}


def tiny(kind: str, **more: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**{**BASE, **more})


REFUSED: dict[str, tuple[Callable[[], Any], str, str, str]] = {  # config, HF's refusal, GGUF's name and refusal
    "gemma2": (lambda: tiny("Gemma2", **WINDOW), "'gemma2' is not", "GEMMA2", "architecture 'gemma2' is not"),
    "gemma3": (lambda: tiny("Gemma3Text", **WINDOW), "'gemma3_text' is not", "GEMMA3", "architecture 'gemma3' is not"),
    "phi3": (lambda: tiny("Phi3"), "model_type 'phi3' is not", "PHI3", "architecture 'phi3' is not"),
    "gpt-oss": (lambda: tiny("GptOss", **EXPERTS), "'gpt_oss' is not", "GPT_OSS", "architecture 'gpt-oss' is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, refusal, arch, gguf_refusal = REFUSED[name]
    model = random_model(config())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=refusal) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    path = write_any(model, gguf.MODEL_ARCH[arch], tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=gguf_refusal) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_what_is_refused_is_what_is_not_run() -> None:
    """When one of these learns to run, its line above must go."""
    kinds = {name: config().model_type for name, (config, *_) in REFUSED.items()}
    assert not {name for name, kind in kinds.items() if kind in ARCHITECTURES}


def write_any(model: Any, arch: gguf.MODEL_ARCH, path: Path) -> Path:
    """The model under the names of llama.cpp, as far as they are known; keys of its kind of attention and experts."""
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if n_experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    names, written = gguf.get_tensor_name_map(arch, config.num_hidden_layers), set()
    for name, tensor in model.state_dict().items():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is not None and known not in written:
            writer.add_tensor(known, tensor.to(torch.float32).contiguous().numpy())
            written.add(known)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
