"""The metadata of a GGUF file: what this decoder understands of it, what changes nothing, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hostring.integrations.llm.checkpoint.fields import Fields, naming
from hostring.integrations.llm.checkpoint.gguf_experts import ALWAYS_EXPERTS, experts_from_gguf
from hostring.integrations.llm.checkpoint.gguf_rope import rope_from_gguf
from hostring.integrations.llm.model.config import ModelConfig

GGUF_ARCHITECTURES = ("qwen3", "qwen2", "llama", "smollm3", *ALWAYS_EXPERTS)  # Mistral's and Mixtral's say "llama"
INTERLEAVED = ("llama", "smollm3", "mixtral")
"""Model types for which llama.cpp's converter interleaves the two halves of every query and key head."""

_UNROTATED_EVERY = {"smollm3": 4}  # which no key says: llama.cpp knows it, too

# Keys below the architecture's name that change nothing, or say again what the shapes of the tensors say.
_HARMLESS = ("rope.scaling.original_context_length", "rope.scaling.finetuned")

# Keys that change nothing with these values, and the result with any other.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "use_parallel_residual": (False,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_LAYOUTS = ("reference", "Meta AI original pth")


def config_from_gguf(source: object, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Read GGUF metadata; what the metadata leaves out is taken from the shapes of the tensors.

    Args:
        source: the file, for errors.
        values: metadata, key to plain value.
        shapes: tensor name to shape, row-major as in numpy (GGUF itself lists the fastest dimension first).

    Raises:
        ValueError: an architecture or option that this decoder doesn't have, a missing key, or one that is unknown.
    """
    general = Fields(source, values)
    _refuse_other_files(general)
    arch = general.choice("general.architecture", GGUF_ARCHITECTURES, what="GGUF architecture")
    fields = Fields(source, values, f"{arch}.")
    _refuse_other_values(fields)
    with naming(source):
        config = _config(source, fields, arch, shapes)
    fields.ignore(_HARMLESS)
    fields.refuse_unknown(what="keys of the architecture")
    return config


def _config(source: object, fields: Fields, arch: str, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    vocab, hidden = _shape(source, shapes, "token_embd.weight")
    q_rows, k_rows = (_shape(source, shapes, f"blk.0.attn_{n}.weight")[0] for n in "qk")
    kind, experts, up = experts_from_gguf(fields, arch, shapes)
    columns = _shape(source, shapes, up)[0]
    heads = fields.whole("attention.head_count")
    head_dim = fields.whole("attention.key_length", max(1, q_rows // heads))
    _check_heads(fields, heads, head_dim, q_rows)
    _check_sizes(fields, shapes, head_dim, k_rows // head_dim, columns)
    fields.only("attention.scale", 0.0, head_dim**-0.5)
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=columns,
        num_hidden_layers=fields.whole("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=fields.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        model_type=kind,
        rms_norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.real("rope.freq_base", 10000.0),
        rope_scaling=rope_from_gguf(fields),
        max_position_embeddings=fields.whole("context_length", 2048),
        qk_norm=_has(shapes, "attn_q_norm.weight", "attn_k_norm.weight"),
        qkv_bias=_has(shapes, "attn_q.bias", "attn_k.bias", "attn_v.bias"),
        o_bias=_has(shapes, "attn_output.bias"),
        mlp_bias=_has(shapes, "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
        tie_word_embeddings="output.weight" not in shapes,
        unrotated_layers=_unrotated_layers(fields, arch),
        qk_norm_across=arch == "olmoe",
        experts=experts,
        windows=_windows(fields, arch),
    )


def _refuse_other_values(fields: Fields) -> None:
    """Options that change the result: other values than these."""
    for key, neutral in _NEUTRAL.items():
        fields.only(key, *neutral)
    fields.only("tensor_data_layout", *_LAYOUTS)


def _windows(fields: Fields, arch: str) -> tuple[int, ...]:
    """A window of all layers, as Mistral's files have it; in other models the files don't say which layers have it."""
    name = "attention.sliding_window"
    if fields.get(name) in (None, 0) or fields.whole(name) >= fields.whole("context_length", 2048):
        return ()
    if arch != "llama":
        raise fields.wrong(name, f"0, or a window of all positions (context_length): which layers of {arch} have it?")
    return (fields.whole(name),) * fields.whole("block_count")


def _unrotated_layers(fields: Fields, arch: str) -> tuple[int, ...]:
    every = _UNROTATED_EVERY.get(arch)
    return () if every is None else tuple(range(every - 1, fields.whole("block_count"), every))


def _refuse_other_files(general: Fields) -> None:
    """Files that hold no model."""
    general.only("general.type", "model")
    if general.get("adapter.type") is not None:
        raise general.wrong("adapter.type", "a whole model, not an adapter; merge it into its model first")


def _shape(source: object, shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    if name not in shapes:
        experts = any(".ffn_up.0." in other or "ffn_gate_inp" in other for other in shapes)
        why = "it has experts, and expert_count doesn't say so" if experts else "a decoder of its kind has one"
        raise ValueError(f"{source} has no tensor {name}; {why}")
    shape = shapes[name]
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{source}: {name} has shape {shape}; expected a matrix")
    return shape


def _check_heads(fields: Fields, heads: int, head_dim: int, q_rows: int) -> None:
    if heads * head_dim != q_rows:
        count, length = (f"{fields.prefix}attention.{name}" for name in ("head_count", "key_length"))
        raise ValueError(
            f"{fields.source}: {count} is {heads} and {length} is {head_dim}, but blk.0.attn_q.weight has "
            f"{q_rows} rows; "
            "expected the product of the two"
        )


def _check_sizes(
    fields: Fields, shapes: Mapping[str, tuple[int, ...]], head_dim: int, kv_heads: int, columns: int
) -> None:
    """What the metadata says again must be what the tensors say. columns: of the MLP."""
    vocab, hidden = shapes["token_embd.weight"]
    layers = {name.split(".")[1] for name in shapes if name.startswith("blk.")}
    for key, size in (
        ("vocab_size", vocab),
        ("embedding_length", hidden),
        *(() if fields.asked("feed_forward_length") else (("feed_forward_length", columns),)),
        ("block_count", len(layers)),
        ("attention.head_count_kv", kv_heads),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
    ):
        if fields.whole(key, size) != size:
            raise fields.wrong(key, f"{size}, as the tensors imply")


def _has(shapes: Mapping[str, tuple[int, ...]], *ends: str) -> bool:
    """Whether the first layer has all of these tensors. What other layers have or lack is then found by
    `check_tensors`."""
    return all(f"blk.0.{end}" in shapes for end in ends)
