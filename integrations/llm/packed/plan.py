"""Where row-parallel products are cut into units, for any number of ranks alike, and plans whose shares are whole
units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from hostring.integrations.llm.model.apportion import apportion
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan

MAX_PARTS = 8  # of the MLP; more would cost every number of ranks time

Units: TypeAlias = tuple[range, ...]


@dataclass(frozen=True)
class UnitPlan:
    """The units of a model: what a row-parallel product sums separately, whoever computes it.

    Attributes:
        groups: KV-head groups of each unit of the attention's output projection.
        columns: FFN columns of each unit of the MLP's down projection.
    """

    groups: Units
    columns: Units

    @staticmethod
    def of(config: ModelConfig, group_block: int, column_block: int) -> UnitPlan:
        """A unit for each KV-head group, and as many of the MLP, with a cut in its middle too: that balances 2 ranks.

        Args:
            group_block: inputs of the output projection that no cut may divide, such as a quantisation block.
            column_block: the same for the down projection.

        Raises:
            ValueError: the FFN's columns are not whole blocks.
        """
        groups, columns = config.num_key_value_heads, config.intermediate_size
        if columns % column_block:
            raise ValueError(f"{columns} FFN columns are not whole blocks of {column_block}")
        width = config.group_heads * config.head_dim
        whole = [g for g in range(groups) if g * width % group_block == 0]
        n_blocks, parts = columns // column_block, min(len(whole), MAX_PARTS)
        cuts = {round(n_blocks * part / parts) for part in range(parts)} | {n_blocks // 2 if n_blocks > 1 else 0}
        return UnitPlan(_units(whole, groups), _units([column_block * cut for cut in sorted(cuts)], columns))

    def shares(self, config: ModelConfig, world_size: int) -> ShardPlan:
        """Shares of whole units that are as even as the units allow.

        Raises:
            ValueError: more ranks than units; says how many there are.
        """
        if world_size > len(self.groups):
            raise ValueError(
                f"{world_size} ranks are more than the {len(self.groups)} parts into which this file's attention can "
                f"be cut ({config.num_key_value_heads} KV-head groups on block borders); use at most "
                f"{len(self.groups)} ranks, or compute exact"
            )
        vocab = apportion(config.vocab_size, [1.0] * world_size)
        return ShardPlan(_cut(self.groups, world_size), _cut(self.columns, world_size), vocab)

    def groups_per_rank(self, plan: ShardPlan) -> list[int]:
        """Units of attention that each rank holds.

        Raises:
            ValueError: a share ends inside of a unit, or ranks share KV heads.
        """
        if plan.heads:
            raise ValueError("ranks that share KV heads can't compute packed; compute exact")
        return _per_rank(self.groups, plan.kv_groups, "KV-head groups")

    def columns_per_rank(self, plan: ShardPlan) -> list[int]:
        """The same for units of the MLP, or of every expert.

        Raises:
            ValueError: a share ends inside of a unit, or ranks hold experts whole.
        """
        if plan.experts:
            raise ValueError("ranks that hold whole experts can't compute packed; leave experts=place out")
        return _per_rank(self.columns, plan.columns, "FFN columns")


def _units(starts: Sequence[int], total: int) -> Units:
    return tuple(range(a, b) for a, b in pairwise([*starts, total]))


def _cut(units: Units, world_size: int) -> tuple[int, ...]:
    """Elements of each rank, when every rank gets whole units, at least one while there are some."""
    total, n = units[-1].stop, len(units)
    stops = [0]
    for rank in range(1, world_size):
        first = stops[-1] + 1 if n >= world_size else stops[-1]
        last = n - (world_size - rank) if n >= world_size else n
        ideal = total * rank / world_size
        at = max(first, min(range(n + 1), key=lambda k: (abs((units[k].start if k < n else total) - ideal), -k)))
        stops.append(min(at, last))
    bounds = [units[k].start if k < n else total for k in [*stops, n]]
    return tuple(b - a for a, b in pairwise(bounds))


def _per_rank(units: Units, shares: Sequence[int], what: str) -> list[int]:
    bounds = [unit.start for unit in units] + [units[-1].stop]
    found, start = [], 0
    for share in shares:
        stop = start + share
        if start not in bounds or stop not in bounds:
            raise ValueError(f"{what} {start} to {stop} are not whole units; cuts may lie at {bounds}")
        found.append(bounds.index(stop) - bounds.index(start))
        start = stop
    return found
