"""Units of a row-parallel product lie on block borders, and shares are whole units."""

from __future__ import annotations

import pytest

from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.packed.plan import UnitPlan


def config(heads: int, kv_heads: int, columns: int, head_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=columns,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )


def test_units_lie_on_block_borders_and_balance_two_ranks() -> None:
    units = UnitPlan.of(config(9, 3, 1536), 32, 32)
    assert [len(u) for u in units.groups] == [1, 1, 1]
    assert [u.stop for u in units.columns] == [512, 768, 1024, 1536]
    assert units.shares(config(9, 3, 1536), 2) == ShardPlan((2, 1), (768, 768), (500, 500))
    assert units.shares(config(9, 3, 1536), 3).columns == (512, 512, 512)
    coarse = UnitPlan.of(config(8, 8, 1536), 256, 256)  # four groups of 64 columns make a block of 256
    assert [len(u) for u in coarse.groups] == [4, 4]
    assert [u.stop for u in coarse.columns] == [768, 1536]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_shares_are_whole_units_and_cover_the_model(world_size: int) -> None:
    model = config(16, 8, 1408)
    units = UnitPlan.of(model, 32, 32)
    plan = units.shares(model, world_size)
    plan.check(model)
    assert sum(units.groups_per_rank(plan)) == len(units.groups)
    assert sum(units.columns_per_rank(plan)) == len(units.columns)
    assert min(plan.columns) > 0


def test_what_cannot_be_cut_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="100 FFN columns are not whole blocks of 32"):
        UnitPlan.of(config(8, 4, 100), 32, 32)
    units = UnitPlan.of(config(8, 4, 1536), 32, 32)
    with pytest.raises(ValueError, match="5 ranks are more than the 4 parts"):
        units.shares(config(8, 4, 1536), 5)
    with pytest.raises(ValueError, match="FFN columns 0 to 100 are not whole units"):
        units.columns_per_rank(ShardPlan((2, 2), (100, 1436), (500, 500)))
