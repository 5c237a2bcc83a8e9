"""Experts in GGUF files: the keys that describe them, and the tensors that hold all experts of a layer in one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from hostring.integrations.llm.checkpoint.fields import Fields
from hostring.integrations.llm.checkpoint.gguf_header import TensorInfo
from hostring.integrations.llm.model.config import Mixture


@dataclass(frozen=True)
class _Kind:
    """What llama.cpp does for an architecture without being told.

    Attributes:
        model_type: the name of the architecture here. normalised: weights of the used experts add up to 1.
        own_columns: `feed_forward_length` is that of other layers than those with experts.
        shared: every layer has a shared expert.
    """

    model_type: str
    normalised: bool
    own_columns: bool = False
    shared: bool = False


_KINDS: Final = {
    "llama": _Kind("mixtral", True),
    "qwen3moe": _Kind("qwen3_moe", True, own_columns=True),
    "qwen2moe": _Kind("qwen2_moe", False, own_columns=True, shared=True),
    "olmoe": _Kind("olmoe", False),
}
ALWAYS_EXPERTS: Final = ("qwen3moe", "qwen2moe", "olmoe")
_SOFTMAX = 1
_FUSED = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight")
_SHARED_GATE = "ffn_gate_inp_shexp.weight"


def experts_apart(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The same with a matrix for each expert, `blk.0.ffn_up.7.weight`, as older files have it, and the scores of the
    shared expert as a matrix of one row."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        fused = _FUSED.fullmatch(name)
        if fused and len(info.shape) == 3:
            nbytes = info.shape[1] * info.row_nbytes
            for n in range(info.shape[0]):
                found[f"{fused[1]}.{n}.weight"] = replace(info, shape=info.shape[1:], offset=info.offset + n * nbytes)
        elif name.endswith(_SHARED_GATE) and len(info.shape) == 1:
            found[name] = replace(info, shape=(1, *info.shape))
        else:
            found[name] = info
    return found


def experts_from_gguf(
    fields: Fields, arch: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, Mixture | None, str]:
    """The model type, its experts, and the name of a tensor whose rows are the FFN columns.

    Args:
        fields: the keys below the architecture's name. shapes: of the tensors, with experts apart.

    Raises:
        ValueError: experts that this architecture doesn't have, or that are chosen or weighted in another way.
    """
    kind = _KINDS.get(arch)
    if kind is None or (arch not in ALWAYS_EXPERTS and fields.get("expert_count") in (None, 0)):
        fields.only("expert_count", 0)
        fields.only("expert_used_count", 0)
        return arch, None, "blk.0.ffn_up.weight"
    up = "blk.0.ffn_up.0.weight"
    if up not in shapes:
        raise fields.wrong("expert_count", "0 for this file, which has no tensor blk.0.ffn_up_exps.weight")
    fields.only("expert_gating_func", 0, _SOFTMAX)
    fields.only("expert_weights_norm", kind.normalised)
    scale = 1.0 if fields.get("expert_weights_scale") in (None, 0.0) else fields.real("expert_weights_scale")
    columns, shared = (shapes.get(name, (0,))[0] for name in (up, "blk.0.ffn_up_shexp.weight"))
    for key, size in (("expert_feed_forward_length", columns), ("expert_shared_feed_forward_length", shared)):
        if size and fields.whole(key, size) != size:
            raise fields.wrong(key, f"{size}, as the tensors imply")
    if kind.own_columns:
        fields.ignore(("feed_forward_length",))
    count, used = fields.whole("expert_count"), fields.whole("expert_used_count")
    return kind.model_type, Mixture(count, used, kind.normalised, scale, shared if kind.shared else 0), up
