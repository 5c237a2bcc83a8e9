"""Tiny random checkpoints for the model tests, made by `transformers` and by `gguf`, which are also the oracles."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hostring.integrations.llm.packed.library import load

TEXT = "In the beginning God created the heaven and the earth. 1234 — naïve café 東京 🙂🙃 don't stop\n\n  two  spaces"
SHAPES: dict[str, Any] = {
    "hidden_size": 60,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "vocab_size": 101,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3-tied": lambda: transformers.Qwen3Config(head_dim=16, tie_word_embeddings=True, **SHAPES),
    "qwen3-untied-biased": lambda: transformers.Qwen3Config(
        head_dim=8, tie_word_embeddings=False, attention_bias=True, **SHAPES
    ),
    "qwen2": lambda: transformers.Qwen2Config(tie_word_embeddings=False, **SHAPES),
    "llama": lambda: transformers.LlamaConfig(head_dim=12, tie_word_embeddings=True, **SHAPES),
    "llama-biased-long": lambda: transformers.LlamaConfig(
        head_dim=16, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3, **SHAPES
    ),
}


def hf_model(family: str, seed: int = 0) -> Any:
    """A random model of `transformers` with weights large enough for logits that differ clearly, biases and norms
    included."""
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="eager").eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # a random model has no end
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
    return model


def packable_model(family: str, kv_heads: int = 3, width: int = 256, tied: bool = True) -> Any:
    """A random model whose cuts lie on the borders of blocks of `width`."""
    shapes = {
        "hidden_size": kv_heads * width,  # transformers wants a multiple of the heads
        "intermediate_size": 4 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // 2,
        "vocab_size": 400,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
    }
    kinds = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config, "qwen2": transformers.Qwen2Config}
    extra = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    config = kinds[family](**shapes, **extra)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.15, generator=generator)
            else:
                parameter.normal_(0.0, 0.6 / (kv_heads * width) ** 0.5, generator=generator)
    return model


def save(model: Any, directory: Path, **options: Any) -> Path:
    """Write a HF directory with a tokenizer."""
    model.save_pretrained(directory, **options)
    tokenizer = byte_tokenizer(model.config.vocab_size)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "chat_template": CHAT}), encoding="utf-8"
    )
    return directory


CHAT = (
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>{% endif %}"
)


def byte_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE with two special tokens; fewer than 258 tokens can't spell every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if vocab_size >= 258 else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<start>", "<end>"],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
GGUF_KINDS = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "mixtral": "llama"}


def write_gguf(
    model: Any,
    path: Path,
    kind: gguf.GGMLQuantizationType,
    tokenizer: Tokenizer | None = None,
    *,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    without: Collection[str] = (),
) -> Path:
    """Write `model` as GGUF, matrices as `kind` where their rows are whole blocks of it, otherwise f32.

    Those of llama and smollm3 get their q and k rows interleaved, as llama.cpp's converter does. `change` may add to
    the file, and replace keys; tensors named in `without` are left out.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, GGUF_KINDS.get(config.model_type, config.model_type))
    _add_shape(writer, config)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    state = _with_fused_experts(model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for name, tensor in state.items():
        values = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if config.model_type in ("llama", "smollm3", "mixtral") and heads:
            values = values.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        if _gguf_name(name) in without:
            continue
        blocks = values.ndim >= 2 and values.shape[-1] % block == 0 and "ffn_gate_inp" not in _gguf_name(name)
        used = kind if blocks else gguf.GGMLQuantizationType.F32
        data = quantize(np.ascontiguousarray(values), used)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=used)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantize(values: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> npt.NDArray[Any]:
    """By gguf where it can; by ggml for K types, which gguf only reads. values: shape (…, columns)."""
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(values, kind)
    chunk = ctypes.CDLL(str(load().file)).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    n_rows, n_columns = values.size // values.shape[-1], values.shape[-1]
    out = np.zeros((*values.shape[:-1], n_columns // block * nbytes), np.uint8)
    assert chunk(int(kind), values.ctypes.data, out.ctypes.data, 0, n_rows, n_columns, None) == out.nbytes
    return out


def _with_fused_experts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Gate and up of all experts as one tensor each."""
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith(".experts") and kind == "gate_up_proj":
            found[f"{stem}.gate.weight"], found[f"{stem}.up.weight"] = tensor.chunk(2, 1)
        else:
            found[f"{stem}.down.weight" if stem.endswith(".experts") else name] = tensor
    return found


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if n_experts := getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if config.model_type in ("qwen3_moe", "qwen2_moe"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if config.model_type == "qwen2_moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    layer, rest = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in ("<start>", "<end>") else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) for m in merges])
    writer.add_bos_token_id(tokenizer.token_to_id("<start>"))
    writer.add_eos_token_id(tokenizer.token_to_id("<end>"))
    writer.add_chat_template(CHAT)
