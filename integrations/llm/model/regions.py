"""What a decoder layer is: its regions in order, each from the norm of the residual stream to a sum over the ranks.

This is written once. Whoever computes brings the operations: torch on tensors of any shape (`eager.py`), calls over
fixed buffers for one row (`one_row.py`), or nodes of ggml graphs (`packed/regions.py`). An operation may compute at
once, or note what is to be computed; a region can't tell. Architectures differ in what `layers_of` returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from hostring.integrations.llm.model.attention_kind import FULL, AttentionKind
from hostring.integrations.llm.model.config import Mixture, ModelConfig

X = TypeVar("X")


@dataclass(frozen=True)
class Attention:
    """Queries, keys and values, attention over the cache, and the output projection.

    Attributes:
        heads, kv_heads, head_dim: of this rank.
        qk_norm: queries and keys are normalised before they are turned to their positions.
        across: not each by itself, but all queries of a token together, and all keys.
        rotates: queries and keys are turned to their positions.
        kind: which positions a query sees.
        norm, side, first, last: where its weights are: the norm, and the matrices `side.first` and `side.last`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    rotates: bool = True
    across: bool = False
    kind: AttentionKind = FULL
    norm: str = "input_norm"
    side: str = "attention"
    first: str = "qkv_proj"
    last: str = "o_proj"

    def run(self, ops: Operations[X], h: X) -> X:
        """The residual stream after this region; h: before it."""
        return ops.add_sum(h, self.inside(ops, h), self)

    def inside(self, ops: Operations[X], h: X) -> X:
        """What the last matrix multiplies. Nothing of this needs another rank."""
        x = ops.norm(h, self)
        heads = ops.project(x, self)
        if self.qk_norm:
            heads = ops.norm_across(heads, x, self) if self.across else ops.norm_heads(heads, self)
        return ops.attend(ops.turn(heads, self), self)


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)), with `columns` of the model's on this rank; the names as in `Attention`."""

    columns: int
    norm: str = "post_norm"
    side: str = "mlp"
    first: str = "gate_up_proj"
    last: str = "down_proj"

    def run(self, ops: Operations[X], h: X) -> X:
        """The residual stream after this region; h: before it."""
        return ops.add_sum(h, self.inside(ops, h), self)

    def inside(self, ops: Operations[X], h: X) -> X:
        """See `Attention.inside`."""
        return ops.gate(ops.project(ops.norm(h, self), self), self)


@dataclass(frozen=True)
class Experts:
    """The sum of some of many gated MLPs, chosen for each token and weighted.

    Every expert is cut in the same way, so that all ranks compute all experts that a token uses, each its columns.

    Attributes:
        columns: of each expert, on this rank. mixture: how many experts there are, and how they are chosen; its shared
            columns are those on this rank.
        norm, side, first, last: as in `Attention`; each expert has its own first and last matrix.
    """

    columns: int
    mixture: Mixture
    norm: str = "post_norm"
    side: str = "mlp"
    first: str = "gate_up_proj"
    last: str = "down_proj"

    def run(self, ops: Operations[X], h: X) -> X:
        """The residual stream after this region; h: before it."""
        return ops.add_sum(h, self.inside(ops, h), self)

    def inside(self, ops: Operations[X], h: X) -> X:
        """See `Attention.inside`."""
        x = ops.norm(h, self)
        return ops.gate_experts(x, ops.route(h, x, self), self)


Region: TypeAlias = Attention | GatedMlp | Experts


class Operations(Protocol[X]):
    """How one layer computes. X stands for what operations pass on: a tensor, a buffer, or nodes of a graph."""

    def norm(self, h: X, region: Region) -> X:
        """RMSNorm of the residual stream."""

    def project(self, x: X, region: Region) -> X:
        """x times the region's first matrices, with their biases."""

    def norm_heads(self, heads: X, region: Attention) -> X:
        """RMSNorm of each query and each key."""

    def norm_across(self, heads: X, x: X, region: Attention) -> X:
        """RMSNorm of all queries together, and of all keys, of which other ranks hold some; x is what they were
        projected from."""

    def turn(self, heads: X, region: Attention) -> X:
        """Queries and keys turned to their positions, unless the region doesn't rotate."""

    def attend(self, heads: X, region: Attention) -> X:
        """Write the new keys and values, and attend to all."""

    def gate(self, gate_up: X, region: GatedMlp) -> X:
        """silu(gate) * up."""

    def route(self, h: X, x: X, region: Experts) -> X:
        """Which experts each row uses, and their weights; x is the norm of h. The same experts on every rank."""

    def gate_experts(self, x: X, routes: X, region: Experts) -> X:
        """silu(gate) * up of each expert that a row uses, with the routes."""

    def add_sum(self, h: X, x: X, region: Region) -> X:
        """h plus the sum over all ranks of x times the region's last matrix."""


def layers_of(config: ModelConfig) -> list[tuple[Region, ...]]:
    """The regions of each layer. config: shapes of the whole model, or of a rank's part of it."""
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    mlp: Region = GatedMlp(config.intermediate_size)
    if config.experts is not None:
        mlp = Experts(config.intermediate_size, config.experts)
    windows = config.windows or (0,) * config.num_hidden_layers
    return [
        (
            Attention(
                *heads,
                config.qk_norm,
                layer not in config.unrotated_layers,
                config.qk_norm_across,
                AttentionKind(window) if window else FULL,
            ),
            mlp,
        )
        for layer, window in enumerate(windows)
    ]
