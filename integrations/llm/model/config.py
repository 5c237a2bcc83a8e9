"""What a decoder looks like: shapes and options. `checkpoint/hf_config.py` and `gguf_config.py` read it from files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hostring.integrations.llm.model.rope import UNSCALED, RopeScaling

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
"""Model types that this decoder covers, and their classes in `transformers`."""

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
class Mixture:
    """The experts of every layer: each token uses some of them.

    Attributes:
        count, used: experts of a layer, and those that a token uses.
        normalised: the weights of those that are used add up to 1 (before `scale`).
        scale: of the weights.
        shared_columns: FFN columns of the expert that every token uses besides; 0 where there is none.
        placed: the experts that this rank holds, whole; None where it holds its columns of all.
    """

    count: int
    used: int
    normalised: bool = True
    scale: float = 1.0
    shared_columns: int = 0
    placed: range | None = None

    @property
    def here(self) -> range:
        """The experts of which this rank computes something."""
        return range(self.count) if self.placed is None else self.placed

    def __post_init__(self) -> None:
        if not 1 <= self.used <= self.count:
            raise ValueError(f"a token can't use {self.used} of {self.count} experts")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and options of one decoder, under the names that HF's `config.json` uses.

    A rank that holds a shard builds its part from the same class with fewer heads and columns.

    Attributes:
        intermediate_size: FFN columns; of each expert, where there are experts.
        qk_norm_across: queries are normalised over all heads together, and so are keys.
        unrotated_layers: which layers don't turn queries and keys to their positions.
        windows: positions that a query of each layer sees, its own and those before; 0 for all. Empty where all layers
            see all.
        experts: None where every layer has one MLP.
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
    rope_scaling: RopeScaling = UNSCALED
    max_position_embeddings: int = 2048
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    unrotated_layers: tuple[int, ...] = ()
    qk_norm_across: bool = False
    experts: Mixture | None = None
    windows: tuple[int, ...] = ()

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

    def of_layers(self, layers: range) -> ModelConfig:
        """The same model with these layers alone, numbered from 0."""
        unrotated = tuple(n - layers.start for n in self.unrotated_layers if n in layers)
        windows = self.windows[layers.start : layers.stop]
        return replace(self, num_hidden_layers=len(layers), unrotated_layers=unrotated, windows=windows)

    def to_hf(self) -> dict[str, Any]:
        """The fields of a HF `config.json` that describes this model."""
        if self.windows:
            raise ValueError("writing sliding windows to config.json is not supported")
        if self.rope_scaling.kind != "none":
            raise ValueError(f"writing rope scaling {self.rope_scaling.kind!r} to config.json is not supported")
        if self.experts is not None:
            raise ValueError("writing the experts of a model to config.json is not supported")
        fields: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
        }
        for name in _PLAIN_FIELDS:
            fields[name] = getattr(self, name)
        if self.model_type in ("qwen3", "llama", "smollm3"):
            fields["attention_bias"] = self.qkv_bias
        if self.model_type in ("llama", "smollm3"):
            fields["mlp_bias"] = self.mlp_bias
        if self.model_type == "smollm3":
            rotated = set(range(self.num_hidden_layers)) - set(self.unrotated_layers)
            fields["no_rope_layers"] = [int(n in rotated) for n in range(self.num_hidden_layers)]
        if self.model_type == "mistral":
            fields["sliding_window"] = None
        return fields
