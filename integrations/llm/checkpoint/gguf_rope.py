"""Rotary positions in GGUF metadata, as llama.cpp reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hostring.integrations.llm.checkpoint.fields import Fields
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.rope import RopeScaling, rotary_divisors, yarn_attention_factor

_KINDS = ("none", "linear", "yarn")


def rope_from_gguf(fields: Fields) -> RopeScaling:
    """The scaling. A factor without a type is linear.

    Raises:
        ValueError: another type, or a factor that is missing or odd.
    """
    old, factor = fields.get("rope.scale_linear"), fields.get("rope.scaling.factor")  # `old`: in the first files
    stretched = any(value not in (None, 0, 1) for value in (old, factor))
    kind = fields.choice("rope.scaling.type", _KINDS, "linear" if stretched else "none", what="rope scaling")
    attention = fields.get("rope.scaling.attn_factor")
    attention = fields.real("rope.scaling.attn_factor") if attention else 1.0
    if kind == "yarn":
        return _yarn(fields, attention)
    if kind == "none":
        fields.only("rope.scale_linear", 0.0, 1.0)
        fields.only("rope.scaling.factor", 0.0, 1.0)
        return RopeScaling(attention_factor=attention)
    name = "rope.scale_linear" if factor is None and old is not None else "rope.scaling.factor"
    fields.only("rope.scale_linear", 0.0, 1.0, factor if factor is not None else old)
    return RopeScaling("linear", fields.real(name), attention_factor=attention)


def with_divisors(config: ModelConfig, divisors: Sequence[float]) -> RopeScaling:
    """The scaling of `config`, and after that a division of each frequency."""
    scaling = config.rope_scaling
    before = rotary_divisors(config.head_dim, config.rope_theta, scaling)
    both = tuple(a * b for a, b in zip(before, divisors, strict=True))
    return replace(scaling, kind="table", divisors=both)


def _yarn(fields: Fields, attention: float) -> RopeScaling:
    fields.only("rope.scale_linear", 0.0, 1.0)
    fields.only("rope.scaling.yarn_ext_factor", -1.0, 1.0)
    fields.only("rope.scaling.yarn_attn_factor", 0.0, 1.0)
    factor = fields.real("rope.scaling.factor")
    original = fields.whole("rope.scaling.original_context_length", fields.whole("context_length", 2048))
    return RopeScaling(
        "yarn",
        factor,
        original_max_positions=original,
        beta_fast=fields.real("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.real("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention * yarn_attention_factor(factor),
    )
