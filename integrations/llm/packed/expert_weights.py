"""The experts of one layer, cut from a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.qwen import RMSNorm
from hostring.integrations.llm.model.routing import Router
from hostring.integrations.llm.packed.experts import ExpertMatrices
from hostring.integrations.llm.packed.regions import Matrices
from hostring.integrations.llm.packed.weights import PackedWeights


def experts_of_layer(
    weights: PackedWeights, config: ModelConfig, local: ModelConfig, name: str, columns: range, units: Sequence[range]
) -> Matrices:
    """What a rank holds of all experts of a layer.

    Args:
        config: the whole model. local: the shapes of this rank's part.
        name: of the layer. columns: of each expert, on this rank, and the units in which they lie.

    Raises:
        ValueError: matrices of several formats, or a router that is not stored in floats.
    """
    mixture, here = config.experts, local.experts
    assert mixture is not None
    assert here is not None
    numbers = range(mixture.count)
    stems = {stem: [f"{name}{stem}.{n}.weight" for n in numbers] for stem in ("ffn_gate", "ffn_up", "ffn_down")}
    shared = shared_units(config, units) if here.shared_columns else []
    rows = range(shared[0].start, shared[-1].stop) if shared else range(0)
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    norm.weight = _frozen(weights.floats(f"{name}ffn_norm.weight"))
    router, scores = Router(config.hidden_size, here), weights.floats(f"{name}ffn_gate_inp.weight")
    router.weight = _frozen(scores)
    return Matrices(
        weights.vector(f"{name}ffn_norm.weight"),
        [(weights.stack(stems[stem], columns), None) for stem in ("ffn_gate", "ffn_up")],
        weights.columns(stems["ffn_down"], units),
        experts=ExpertMatrices(
            router,
            norm,
            weights.constant(scores),
            weights.constant(weights.floats(f"{name}ffn_gate_inp_shexp.weight")) if shared else None,
            [weights.rows(f"{name}{stem}_shexp.weight", rows) for stem in ("ffn_gate", "ffn_up")] if shared else [],
            weights.columns([f"{name}ffn_down_shexp.weight"], shared) if shared else [],
        ),
    )


def shared_units(config: ModelConfig, units: Sequence[range]) -> list[range]:
    """The columns of the shared expert that go with these of every other expert: the same part of them."""
    total = 0 if config.experts is None else config.experts.shared_columns
    return [range(*(total * end // config.intermediate_size for end in (unit.start, unit.stop))) for unit in units]


def _frozen(values: npt.NDArray[np.float32]) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(values), requires_grad=False)
