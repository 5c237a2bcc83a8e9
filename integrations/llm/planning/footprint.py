"""Bytes that a share of the model takes on a rank: weights as the rank keeps them, and the keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.planning.model_file import Matrices, ModelFile

ITEM_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MAX_DEFAULT_SEQ = 4096  # positions of a cache, as `load_model` has it


@dataclass(frozen=True)
class Way:
    """How a rank computes, as far as memory is concerned.

    Attributes:
        compute: "packed" or "exact". dtype: of an exact rank. device: "cpu" or another.
    """

    compute: str = "exact"
    dtype: str = "float32"
    device: str = "cpu"


@dataclass(frozen=True)
class Footprint:
    """Bytes of each unit of a model on one rank, over all layers.

    Attributes:
        group, column, vocab_row: weights of one KV-head group, one FFN column, one row of the output head.
        fixed: what every rank holds whole. cache_group: keys and values of one KV-head group, for a whole cache.
        group_heads: query heads of a group.
        read_share: the part of a column that a token reads: see `ModelFile`.
    """

    group: float
    column: float
    vocab_row: float
    fixed: int
    cache_group: int
    group_heads: int
    read_share: float = 1.0

    @staticmethod
    def of(model: ModelFile, way: Way, max_seq: int | None = None) -> Footprint:
        """The footprint on a rank that computes in this way, with a cache of `max_seq` positions."""
        config, out = model.config, way.dtype
        if way.device == "cpu" and way.compute == "exact":
            out = "float32"  # 16-bit partial sums are made from widened weights
        attention = _kept(model.attention_in, way, way.dtype) + _kept(model.attention_out, way, out)
        mlp = _kept(model.mlp_in, way, way.dtype) + _kept(model.mlp_out, way, out)
        n = config.num_key_value_heads
        return Footprint(
            attention / n,
            mlp / config.intermediate_size,
            _kept(model.head, way, way.dtype) / config.vocab_size,
            4 * model.small.elements + _embedding(model, way),
            cache_nbytes(config, way, cache_positions(config, max_seq)) // n,
            config.group_heads,
            model.read_share,
        )

    def weights(self, plan: ShardPlan, rank: int) -> int:
        """Bytes of weights of a rank of `plan`."""
        units = groups_worth(plan, rank, self.group_heads) * self.group + plan.columns[rank] * self.column
        return self.fixed + round(units + plan.vocab[rank] * self.vocab_row)

    def read(self, plan: ShardPlan, rank: int) -> float:
        """Bytes of weights that a rank of `plan` reads for a token, without what every rank holds whole."""
        unread = (1 - self.read_share) * plan.columns[rank] * self.column
        return self.weights(plan, rank) - self.fixed - unread

    def need(self, plan: ShardPlan, rank: int) -> int:
        """Bytes of weights and of one cache of a rank of `plan`."""
        return self.weights(plan, rank) + self.cache_group * plan.kv_groups[rank]


def groups_worth(plan: ShardPlan, rank: int, group_heads: int) -> float:
    """A rank's attention matrices over those of one KV-head group. Ranks that share a KV head each have a copy."""
    if not plan.heads:
        return plan.kv_groups[rank]
    return (plan.heads[rank] + plan.kv_groups[rank]) / (group_heads + 1)


def cache_positions(config: ModelConfig, max_seq: int | None = None) -> int:
    """Positions of a cache, with the default of `load_model`."""
    return min(config.max_position_embeddings, MAX_DEFAULT_SEQ) if max_seq is None else max_seq


def cache_nbytes(config: ModelConfig, way: Way, positions: int) -> int:
    """Bytes of keys and values of all groups."""
    item = 2 if way.compute == "packed" else 4 if way.device == "cpu" else ITEM_NBYTES[way.dtype]
    return 2 * item * positions * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def _kept(matrices: Matrices, way: Way, dtype: str) -> int:
    return matrices.nbytes if way.compute == "packed" else matrices.elements * ITEM_NBYTES[dtype]


def _embedding(model: ModelFile, way: Way) -> int:
    """Packed ranks look rows up in the mapped file. Others hold all of them, dequantised, in the file's own 16 bits."""
    if way.compute == "packed":
        return 0
    whole = model.embedding
    return 2 * whole.elements if whole.nbytes == 2 * whole.elements else 4 * whole.elements
