"""Which part of a model each rank holds: KV-head groups or parts of one, FFN columns, vocabulary rows. Splits may be
uneven."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from hostring.integrations.llm.model.apportion import apportion, even_columns, level
from hostring.integrations.llm.model.config import ModelConfig

Balance = Literal["regions", "bytes"]


@dataclass(frozen=True)
class Ends:
    """Which ends of the decoder a rank holds: in a pipeline the first stage has the embedding, the last the head."""

    embedding: bool = True
    head: bool = True


WHOLE: Final = Ends()


@dataclass
class Boundaries:
    """What a rank exchanges beside the reductions: over the borders of a pipeline's stage, and to merge attention.

    Attributes:
        sent: f32 elements for each row of a step that this rank sends to the next stage.
        shared: the same, of what the stage before sent, that the ranks of this stage share.
        nbytes_sent: bytes that this rank has sent to the next stage so far, headers included.
        before: the rank from which it receives; None where it receives from none.
        waited: seconds until that rank's streams had come, so far.
        stage, stages: which stage this is, and how many there are.
        in_background: a stream is still sent when a step returns; the next step waits for that.
        merging: the ranks that share a KV cache with this one; None where none do.
        merged: f32 elements for each row that this rank brings to each merge of a step, in order.
    """

    sent: int = 0
    shared: int = 0
    nbytes_sent: int = 0
    before: int | None = None
    waited: float = 0.0
    stage: int = 0
    stages: int = 1
    in_background: bool = False
    merging: Any = None
    merged: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardPlan:
    """How many units every rank holds, in rank order; the same object on all ranks.

    Attributes:
        kv_groups: KV heads, each with the query heads that read it.
        columns: FFN columns (rows of gate and up, columns of down).
        vocab: rows of the output head.
        heads: query heads, where ranks share KV heads; such a rank holds a copy of the KV head that its query heads
            read. Empty where every KV head is on one rank, with all query heads that read it.
        experts: whole experts, where they are placed; `columns` then only cuts what every token uses. Empty where every
            rank holds its columns of all experts.
        copied: every rank holds all that there is.
        context: so many neighbours hold the same heads, and share their KV cache by position and the rows that
            the output projection multiplies.
    """

    kv_groups: tuple[int, ...]
    columns: tuple[int, ...]
    vocab: tuple[int, ...]
    heads: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    copied: bool = field(default=False, kw_only=True)
    context: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if not len(self.kv_groups) == len(self.columns) == len(self.vocab):
            raise ValueError(
                f"a plan needs one number per rank: {len(self.kv_groups)} for KV groups, {len(self.columns)} "
                f"for columns, "
                f"{len(self.vocab)} for vocabulary"
            )
        for name, shares in (("query heads", self.heads), ("experts", self.experts)):
            if shares and len(shares) != self.world_size:
                raise ValueError(f"{len(shares)} numbers of {name} are not one for each of {self.world_size} ranks")
        if min(*self.columns, *self.vocab, *self.heads, *self.experts, 0) < 0:
            raise ValueError(f"negative shares in {self}")

    @property
    def world_size(self) -> int:
        return len(self.kv_groups)

    @property
    def sha256(self) -> str:
        """The same for the same shares, and for no others."""
        usual = {"copied": False, "context": 1, "experts": ()}  # left out, as before there was anything else
        fields = {name: value for name, value in asdict(self).items() if usual.get(name) != value}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @staticmethod
    def copies(config: ModelConfig, world_size: int) -> ShardPlan:
        """Every rank holds the whole model."""
        whole = (config.num_key_value_heads, config.intermediate_size, config.vocab_size)
        kv_groups, columns, vocab = ((n,) * world_size for n in whole)
        return ShardPlan(kv_groups, columns, vocab, copied=True)

    @staticmethod
    def balanced(config: ModelConfig, world_size: int, balance: Balance = "regions") -> ShardPlan:
        """Split evenly, as far as whole KV-head groups allow. More ranks than groups share KV heads.

        Args:
            config: the whole model.
            world_size: number of ranks.
            balance: "bytes" gives a rank with fewer heads more FFN columns, until all hold the same weights;
                "regions" splits attention and FFN evenly each for itself. The ranks wait for each other after
                both, so "regions" is the faster one where memory is no concern.

        Raises:
            ValueError: more ranks than query heads; names the nearest number that is possible.
        """
        groups = config.num_key_value_heads
        heads: tuple[int, ...] = ()
        if world_size > groups:
            heads, kv_groups = _shared_heads(config, world_size), (1,) * world_size
        else:
            kv_groups = apportion(groups, [1.0] * world_size)
        attention = ShardPlan(kv_groups, (0,) * world_size, (0,) * world_size, heads)
        column = config.num_hidden_layers * ffn_column_elements(config)
        held = [attention.n_elements(config, r) / column if balance == "bytes" else 0.0 for r in range(world_size)]
        shares = level(held, config.intermediate_size)
        columns = even_columns(config.intermediate_size, shares)
        plan = ShardPlan(kv_groups, columns, apportion(config.vocab_size, [1.0] * world_size), heads)
        plan.check(config)
        return plan

    @staticmethod
    def placed(config: ModelConfig, world_size: int) -> ShardPlan:
        """Whole experts on each rank, as many on each as possible; attention and what every token uses are split.

        Raises:
            ValueError: the model has no experts, or more ranks than query heads.
        """
        if config.experts is None:
            raise ValueError(f"a {config.model_type} model has no experts to place; leave experts=place out")
        even, experts = ShardPlan.balanced(config, world_size), apportion(config.experts.count, [1.0] * world_size)
        return replace(even, columns=apportion(config.intermediate_size, experts), experts=experts)

    def check(self, config: ModelConfig) -> None:
        """Raise a ValueError unless this plan covers `config` exactly."""
        attention = ("query heads", self.heads[:: self.context], config.num_attention_heads)
        groups = ("KV-head groups", self.kv_groups[:: self.context], config.num_key_value_heads)
        for name, shares, total in (
            attention if self.heads else groups,
            ("FFN columns", self.columns, config.intermediate_size),
            ("vocabulary rows", self.vocab, config.vocab_size),
        ):
            if sum(shares) != total:
                raise ValueError(f"plan {_slashed(shares)} covers {sum(shares)} {name}; the model has {total}")
        if min(self.kv_groups) < 1:
            raise ValueError(
                f"plan {_slashed(self.kv_groups)} leaves a rank without a KV-head group; every rank needs one"
            )
        count = 0 if config.experts is None else config.experts.count
        if self.experts and sum(self.experts) != count:
            raise ValueError(
                f"plan {_slashed(self.experts)} places {sum(self.experts)} experts; the model has {count} in a layer"
            )
        for rank in range(self.world_size if self.heads else 0):
            self._check_shared(config, rank)

    def _check_shared(self, config: ModelConfig, rank: int) -> None:
        heads, groups = self.attention_of(config, rank)
        whole = heads.start % config.group_heads == heads.stop % config.group_heads == 0
        if len(groups) != self.kv_groups[rank] or not (whole or len(groups) == 1):
            raise ValueError(
                f"plan {_slashed(self.heads)} gives rank {rank} the query heads {heads.start} to {heads.stop - 1}, "
                f"which read {len(groups)} KV heads; heads of one KV head, or all of several, can be on a rank"
            )

    def groups_of(self, rank: int) -> range:
        """KV heads of `rank`, in a plan where ranks share none."""
        return self._range(self.kv_groups[:: self.context], rank // self.context)

    def attention_of(self, config: ModelConfig, rank: int) -> tuple[range, range]:
        """Query heads of `rank`, and the KV heads that they read."""
        per_group = config.group_heads
        if self.heads:
            heads = self._range(self.heads[:: self.context], rank // self.context)
            return heads, range(heads.start // per_group, -(-heads.stop // per_group))
        groups = self.groups_of(rank)
        return range(groups.start * per_group, groups.stop * per_group), groups

    def o_columns(self, config: ModelConfig, rank: int) -> range:
        """Columns of the output projection on `rank`: those of its query heads, or its part of them where ranks hold
        the same heads. That is whole heads, if each of those ranks can have one."""
        heads, _ = self.attention_of(config, rank)
        unit = config.head_dim if len(heads) >= self.context else 1
        n_units = len(heads) * config.head_dim // unit
        own, first = (
            self._range(apportion(n_units, [1.0] * self.context), rank % self.context),
            heads.start * config.head_dim,
        )
        return range(first + own.start * unit, first + own.stop * unit)

    def columns_of(self, rank: int) -> range:
        """FFN columns of `rank`."""
        return self._range(self.columns, rank)

    def experts_of(self, rank: int) -> range | None:
        """Experts that `rank` holds whole; None where experts aren't placed."""
        return self._range(self.experts, rank) if self.experts else None

    def shared_columns_of(self, config: ModelConfig, rank: int) -> range:
        """Columns of the shared expert of `rank`: the same part as of every other expert, as far as whole columns
        allow."""
        total, mine = 0 if config.experts is None else config.experts.shared_columns, self.columns_of(rank)
        start, stop = (total * end // max(1, config.intermediate_size) for end in (mine.start, mine.stop))
        return range(start, stop)

    def vocab_of(self, rank: int) -> range:
        """Vocabulary rows of `rank`."""
        return self._range(self.vocab, rank)

    def _range(self, shares: Sequence[int], rank: int) -> range:
        first = 0 if self.copied else sum(shares[:rank])
        return range(first, first + shares[rank])

    def local_config(self, config: ModelConfig, rank: int) -> ModelConfig:
        """The shapes of the part that `rank` holds. The vocabulary stays whole: it is that of the embedding."""
        heads, groups = self.attention_of(config, rank)
        experts = config.experts
        if experts is not None:
            shared = self.shared_columns_of(config, rank)
            experts = replace(experts, shared_columns=len(shared), placed=self.experts_of(rank))
        return replace(
            config,
            num_key_value_heads=len(groups),
            num_attention_heads=len(heads),
            intermediate_size=config.intermediate_size if self.experts else self.columns[rank],
            experts=experts,
        )

    def n_elements(self, config: ModelConfig, rank: int) -> int:
        """Matrix elements that `rank` reads for one token: layers and its part of the head."""
        heads, groups = self.attention_of(config, rank)
        qkv = config.head_dim * (len(heads) + 2 * len(groups))
        attention = config.hidden_size * (qkv + len(self.o_columns(config, rank)))
        if (mixture := config.experts) is None:
            mlp = self.columns[rank] * ffn_column_elements(config)
        else:
            used = mixture.used * self.columns[rank] + len(self.shared_columns_of(config, rank))
            mlp = config.hidden_size * (3 * used + mixture.count)
        if config.qk_norm_across:  # which needs the squares of all queries and keys
            others = config.num_attention_heads - len(heads) + config.num_key_value_heads - len(groups)
            attention += config.hidden_size * config.head_dim * others
        layer = attention + mlp
        return config.num_hidden_layers * layer + self.vocab[rank] * config.hidden_size

    def describe(self, config: ModelConfig) -> str:
        """A table for people, one line per rank."""
        lines = ["rank  query heads  KV heads  FFN columns  vocabulary  weights"]
        total = sum(self.n_elements(config, r) for r in range(self.world_size))
        for r in range(self.world_size):
            mine, (heads, groups) = self.n_elements(config, r), self.attention_of(config, r)
            lines.append(
                f"{r:4}  {len(heads):11}  {len(groups):8}  {self.columns[r]:11}  {self.vocab[r]:10}  "
                f"{mine / 1e6:.1f} M ({100 * mine / total:.1f} %)"
            )
        return "\n".join(lines)


def ffn_column_elements(config: ModelConfig) -> int:
    """Matrix elements of one FFN column in one layer: gate, up and down; of all experts, where there are some."""
    return 3 * config.hidden_size * (1 if config.experts is None else config.experts.count)


def _slashed(shares: Sequence[int]) -> str:
    return "/".join(map(str, shares))


def _shared_heads(config: ModelConfig, world_size: int) -> tuple[int, ...]:
    """Query heads of each rank, when there are more ranks than KV heads: each rank's read one KV head."""
    if world_size > config.num_attention_heads:
        n = config.num_attention_heads
        raise ValueError(
            f"{world_size} ranks can't share {n} query heads, each needs at least one; the nearest legal plan has "
            f"{n} ranks with a query head each"
        )
    ranks = apportion(world_size, [1.0] * config.num_key_value_heads)
    return tuple(n for k in ranks for n in apportion(config.group_heads, [1.0] * k))
