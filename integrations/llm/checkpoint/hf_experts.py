"""The fields of `config.json` that describe experts."""

from __future__ import annotations

from typing import Final

from hostring.integrations.llm.checkpoint.fields import Fields
from hostring.integrations.llm.model.config import Mixture

WITH_EXPERTS: Final = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
_OWN_COLUMNS = ("qwen3_moe", "qwen2_moe")  # `intermediate_size` is that of their layers without experts
_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def experts_from_hf(fields: Fields, kind: str) -> tuple[int, Mixture | None]:
    """FFN columns, of each expert where there are experts; and these. kind: the model type.

    Raises:
        ValueError: some layers have experts and others don't.
    """
    if kind not in WITH_EXPERTS:
        return fields.whole("intermediate_size"), None
    fields.ignore(_TRAINING)
    columns, shared, normalised = fields.whole("intermediate_size"), 0, kind == "mixtral"
    if kind in _OWN_COLUMNS:
        columns = fields.whole("moe_intermediate_size")
        fields.only("decoder_sparse_step", 1)
        fields.only("mlp_only_layers", [])
    if kind == "qwen2_moe":
        shared = fields.whole("shared_expert_intermediate_size")
    if kind != "mixtral":
        normalised = fields.flag("norm_topk_prob")
    return columns, Mixture(_count(fields), fields.whole("num_experts_per_tok"), normalised, shared_columns=shared)


def _count(fields: Fields) -> int:
    """Releases of `transformers` call it by two names."""
    names = [name for name in ("num_experts", "num_local_experts") if fields.get(name) is not None]
    count = fields.whole(names[0] if names else "num_experts")
    fields.only(names[-1] if names else "num_experts", count)
    return count
