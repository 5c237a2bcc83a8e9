"""`config.json` of a Hugging Face directory: what this decoder understands of it, what changes nothing, and what is
refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hostring.integrations.llm.checkpoint.fields import Fields, naming
from hostring.integrations.llm.checkpoint.hf_experts import experts_from_hf
from hostring.integrations.llm.checkpoint.hf_quantisation import layout_from_hf
from hostring.integrations.llm.checkpoint.hf_rope import rope_from_hf
from hostring.integrations.llm.checkpoint.hf_windows import windows_from_hf
from hostring.integrations.llm.model.config import ARCHITECTURES, ModelConfig

_SILU = ("silu", "swish")
_MAY_HAVE_ATTENTION_BIAS = ("qwen3", "llama", "smollm3", "qwen3_moe", "olmoe")
_MAY_HAVE_MLP_BIAS = ("llama", "smollm3")

# Fields that change nothing in a forward pass over text: names, training, and what `transformers` returns beside
# logits.
_HARMLESS = (
    "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range", "_name_or_path",
    "name_or_path", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "pretraining_tp", "chunk_size_feed_forward", "output_hidden_states", "output_attentions",
    "return_dict", "id2label", "label2id", "num_labels", "problem_type", "is_encoder_decoder", "tie_encoder_decoder",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "experts_implementation",
    "use_bfloat16", "torchscript", "tf_legacy_loss", "finetuning_task", "task_specific_params", "tokenizer_class",
    "prefix", "is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version", "model_max_length",
    "max_window_layers", "hidden_dropout", "resid_pdrop", "_commit_hash",
)  # fmt: skip

# How to choose tokens: `transformers` once kept that here. `Sampling` says it in hostring.
_GENERATION = (
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip


def config_from_hf(source: object, values: Mapping[str, Any]) -> ModelConfig:
    """Read the fields of a HF `config.json`.

    Args:
        source: the file, for errors.
        values: its content.

    Raises:
        ValueError: an architecture or option that this decoder doesn't have, a missing field, or one that is unknown.
    """
    fields = Fields(source, values)
    kind = fields.choice("model_type", ARCHITECTURES, what="model_type")
    _refuse_unsupported(fields, kind)
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    biased = kind in _MAY_HAVE_ATTENTION_BIAS and fields.flag("attention_bias")
    theta, scaling = rope_from_hf(fields, {"smollm3": 2e6, "mixtral": 1e6}.get(kind, 10000.0))
    columns, experts = experts_from_hf(fields, kind)
    with naming(source):
        config = ModelConfig(
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=columns,
            num_hidden_layers=fields.whole("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_kv_heads(fields, values, kind, heads),
            head_dim=_head_dim(fields, values, kind, hidden, heads),
            model_type=kind,
            rms_norm_eps=fields.real("rms_norm_eps", 1e-5 if kind in ("mixtral", "olmoe") else 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=fields.whole("max_position_embeddings", 2048),
            qk_norm=kind in ("qwen3", "qwen3_moe", "olmoe"),
            qkv_bias=kind == "qwen2" or biased or (kind == "qwen2_moe" and fields.flag("qkv_bias", True)),
            o_bias=biased,
            mlp_bias=kind in _MAY_HAVE_MLP_BIAS and fields.flag("mlp_bias"),
            tie_word_embeddings=fields.flag("tie_word_embeddings", kind == "smollm3"),
            unrotated_layers=_unrotated_layers(fields) if kind == "smollm3" else (),
            qk_norm_across=kind == "olmoe",
            experts=experts,
            windows=windows_from_hf(fields, kind),
        )
    fields.refuse_unknown(what="fields of config.json")
    return config


def _unrotated_layers(fields: Fields) -> tuple[int, ...]:
    """One number per layer, 0 for those; else every `no_rope_layer_interval`th."""
    layers, every = fields.whole("num_hidden_layers"), fields.whole("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers", [(layer + 1) % every for layer in range(layers)])
    if not isinstance(rotated, list) or len(rotated) < layers or not all(isinstance(one, int) for one in rotated):
        raise fields.wrong("no_rope_layers", f"a list of {layers} numbers, 0 for a layer without rotary positions")
    return tuple(layer for layer in range(layers) if not rotated[layer])


def _kv_heads(fields: Fields, values: Mapping[str, Any], kind: str, heads: int) -> int:
    """Null means as many as query heads; absent means it for Llama alone, others have numbers of their own."""
    if kind == "llama" or "num_key_value_heads" in values:
        return fields.whole("num_key_value_heads", heads)
    return fields.whole("num_key_value_heads")


def _head_dim(fields: Fields, values: Mapping[str, Any], kind: str, hidden: int, heads: int) -> int:
    """Qwen3's head_dim is 128 where the file has none, whatever the other sizes are."""
    if kind == "qwen3" and "head_dim" not in values:
        return 128
    if "head_dim" not in values and hidden % heads:
        raise fields.wrong("head_dim", f"a number: hidden_size {hidden} is not a multiple of {heads} heads")
    return fields.whole("head_dim", hidden // heads)


def _refuse_unsupported(fields: Fields, kind: str) -> None:
    layout_from_hf(fields)
    if fields.get("hidden_act", "silu") not in _SILU:
        raise ValueError(
            f"{fields.source}: hidden_act {fields.get('hidden_act')!r} is not supported; the MLP is SwiGLU "
            f"(silu or swish)"
        )
    fields.only("partial_rotary_factor", 1.0)
    for name in ("rope_interleaved", "use_mrope", "is_decoder", "add_cross_attention"):
        fields.only(name, False)
    if kind not in _MAY_HAVE_MLP_BIAS:
        fields.only("mlp_bias", False)
    if kind in ("mistral", "mixtral"):
        fields.only("attention_bias", False)
    fields.only("clip_qkv")
    fields.only("cross_attention_hidden_size")
    fields.only("pruned_heads", {})
    fields.only("hidden_activation", *_SILU)
    if kind == "qwen2":
        fields.ignore(("attention_bias",))  # q, k and v always have one, which the tensors show
    fields.ignore(_HARMLESS)
    fields.ignore(_GENERATION)
