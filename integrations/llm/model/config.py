"""What a decoder looks like, read from a HF `config.json` or from GGUF metadata and tensor shapes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED = ("qwen3", "qwen2", "llama")
_PLAIN_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for long contexts.

    `kind` is "none", "linear" (divide by `factor`), "llama3" (Llama 3.1's smooth band) or "table"
    (divide each frequency by `divisors`, which is how GGUF ships Llama 3.1's band).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and options of one decoder, under the names that HF's `config.json` uses.

    A rank that holds a shard builds its part from the same class with fewer heads and columns.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    model_type: str = "qwen3"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int = 2048
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads can't be grouped over {self.num_key_value_heads} KV heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need pairs")

    @property
    def group_heads(self) -> int:
        """Query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    @staticmethod
    def from_hf(fields: Mapping[str, Any], tensor_names: Collection[str] = ()) -> ModelConfig:
        """Read the fields of a HF `config.json`.

        Args:
            fields: the parsed file.
            tensor_names: names in the checkpoint; where given they settle biases, QK-norm and the untied head.

        Raises:
            ValueError: an architecture or option that this decoder doesn't have.
        """
        kind = str(fields.get("model_type", ""))
        if kind not in SUPPORTED:
            raise ValueError(f"model_type {kind!r} is not supported; this decoder covers {', '.join(SUPPORTED)}")
        _refuse_unsupported(fields)
        heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
        rope = _hf_rope(fields)
        first = "model.layers.0."
        bias = bool(fields.get("attention_bias", False))
        qkv_bias = kind == "qwen2" or bias
        o_bias = bias
        qk_norm = kind == "qwen3"
        mlp_bias = bool(fields.get("mlp_bias", False))
        if tensor_names:
            qkv_bias = first + "self_attn.q_proj.bias" in tensor_names
            o_bias = first + "self_attn.o_proj.bias" in tensor_names
            mlp_bias = first + "mlp.down_proj.bias" in tensor_names
            qk_norm = first + "self_attn.q_norm.weight" in tensor_names
        return ModelConfig(
            vocab_size=int(fields["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(fields["intermediate_size"]),
            num_hidden_layers=int(fields["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=int(fields.get("head_dim") or hidden // heads),
            model_type=kind,
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", fields.get("rope_theta", 10000.0))),
            rope_scaling=_scaling(rope),
            max_position_embeddings=int(fields.get("max_position_embeddings", 2048)),
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a HF `config.json` that describes this model."""
        architectures = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
        if self.rope_scaling.kind != "none":
            raise ValueError(f"writing rope scaling {self.rope_scaling.kind!r} to config.json is not supported")
        fields: dict[str, Any] = {
            "architectures": [architectures[self.model_type]],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
        }
        for name in _PLAIN_FIELDS:
            fields[name] = getattr(self, name)
        if self.model_type != "qwen2":
            fields["attention_bias"] = self.qkv_bias
        if self.model_type == "llama":
            fields["mlp_bias"] = self.mlp_bias
        return fields

    @staticmethod
    def from_gguf(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
        """Read GGUF metadata; what the metadata leaves out is taken from the shapes of the tensors.

        Args:
            fields: metadata, key to plain value.
            shapes: tensor name to shape, row-major as in numpy (GGUF itself lists the fastest dimension first).
        """
        arch = str(fields.get("general.architecture", ""))
        if arch not in SUPPORTED:
            raise ValueError(f"GGUF architecture {arch!r} is not supported; this decoder covers {', '.join(SUPPORTED)}")

        def field(key: str, default: Any = None) -> Any:
            value = fields.get(f"{arch}.{key}", default)
            if value is None:
                raise ValueError(f"GGUF metadata has no {arch}.{key}")
            return value

        vocab, hidden = shapes["token_embd.weight"]
        heads = int(field("attention.head_count"))
        q_rows, k_rows = shapes["blk.0.attn_q.weight"][0], shapes["blk.0.attn_k.weight"][0]
        head_dim = int(field("attention.key_length", q_rows // heads))
        return ModelConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=shapes["blk.0.ffn_up.weight"][0],
            num_hidden_layers=int(field("block_count")),
            num_attention_heads=q_rows // head_dim,
            num_key_value_heads=k_rows // head_dim,
            head_dim=head_dim,
            model_type=arch,
            rms_norm_eps=float(field("attention.layer_norm_rms_epsilon")),
            rope_theta=float(field("rope.freq_base", 10000.0)),
            rope_scaling=_gguf_scaling(fields, arch),
            max_position_embeddings=int(field("context_length", 2048)),
            qk_norm="blk.0.attn_q_norm.weight" in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            o_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_down.bias" in shapes,
            tie_word_embeddings="output.weight" not in shapes,
        )


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {fields['hidden_act']!r} is not supported; the MLP is SwiGLU (silu)")
    odd = sorted({str(t) for t in fields.get("layer_types") or () if t != "full_attention"})
    if odd or fields.get("use_sliding_window"):
        raise ValueError(
            f"layers of type {', '.join(odd) or 'sliding window'} are not supported; only full attention is"
        )


def _hf_rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`, earlier releases wrote `rope_scaling` (null when there is none)."""
    rope: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return rope


def _scaling(rope: Mapping[str, Any]) -> RopeScaling:
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise ValueError(f"rope scaling {kind!r} is not supported; default, linear and llama3 are")


def _gguf_scaling(fields: Mapping[str, Any], arch: str) -> RopeScaling:
    kind = str(fields.get(f"{arch}.rope.scaling.type", "none"))
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", float(fields[f"{arch}.rope.scaling.factor"]))
    raise ValueError(f"rope scaling {kind!r} in GGUF metadata is not supported; none and linear are")


def rotary_frequencies(config: ModelConfig) -> list[float]:
    """Radians per position for each of the head_dim / 2 pairs, after scaling."""
    half, scaling = config.head_dim // 2, config.rope_scaling
    plain = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)]
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    if scaling.kind == "table":
        return [f / d for f, d in zip(plain, scaling.divisors, strict=True)]
    if scaling.kind == "llama3":
        return [_llama3(f, scaling) for f in plain]
    return plain


def _llama3(frequency: float, s: RopeScaling) -> float:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    turns = s.original_max_positions * frequency / (2 * math.pi)
    if turns < s.low_freq_factor:
        return frequency / s.factor
    if turns > s.high_freq_factor:
        return frequency
    blend = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - blend) * frequency / s.factor + blend * frequency
