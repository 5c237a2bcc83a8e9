"""Rotary positions in `config.json`."""

from __future__ import annotations

from collections.abc import Mapping

from hostring.integrations.llm.checkpoint.fields import Fields
from hostring.integrations.llm.model.rope import RopeScaling, yarn_attention_factor

_KINDS = ("default", "linear", "llama3", "yarn")
_FACTORS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def rope_from_hf(fields: Fields, usual_theta: float) -> tuple[float, RopeScaling]:
    """Theta and scaling.

    transformers 5 writes `rope_parameters`; earlier releases wrote `rope_scaling` and `rope_theta`.

    Args:
        usual_theta: where the file has none.
    """
    new, old = fields.get("rope_parameters"), fields.get("rope_scaling")
    name = "rope_scaling" if old else "rope_parameters"  # the order of transformers
    values = old or new or {}
    if not isinstance(values, Mapping):
        raise fields.wrong(name, "an object with rope_type")
    outer = fields.real("rope_theta", usual_theta)
    rope = Fields(f"{fields.source}: {name}", values)
    old_name = rope.get("type")
    kind = rope.choice("rope_type", _KINDS, old_name or "default", what="rope scaling")
    rope.only("type", kind)
    theta = rope.real("rope_theta", outer)
    rope.only("partial_rotary_factor", 1.0)
    scaling = _scaling(kind, rope, fields.whole("max_position_embeddings", 2048))
    rope.refuse_unknown(what="parameters of rotary positions")
    return theta, scaling


def _scaling(kind: str, rope: Fields, max_positions: int) -> RopeScaling:
    if kind == "default":
        rope.ignore(_FACTORS)  # the default type reads none of them
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", rope.real("factor"))
    original = rope.whole("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        factor, low, high = (rope.real(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        return RopeScaling("llama3", factor, low, high, original)
    factor = rope.real("factor", max_positions / original)
    return RopeScaling(
        "yarn",
        factor,
        original_max_positions=original,
        beta_fast=rope.real("beta_fast", 32.0),
        beta_slow=rope.real("beta_slow", 1.0),
        whole_pairs=rope.flag("truncate", True),
        attention_factor=_attention_factor(rope, factor),
    )


def _attention_factor(rope: Fields, factor: float) -> float:
    """That of the file; else what follows from the two `mscale`s, when there are both; else the paper's."""
    told, top, bottom = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if told is not None:
        return rope.real("attention_factor")
    if top is None or bottom is None:
        return yarn_attention_factor(factor)
    top, bottom = (rope.real(name) for name in ("mscale", "mscale_all_dim"))
    return yarn_attention_factor(factor, top) / yarn_attention_factor(factor, bottom)
