"""Plans: what each rank holds, for any model and any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostring.integrations.llm.checkpoint.layout import slices_of_rank
from hostring.integrations.llm.model.apportion import apportion
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan

SMOL = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, model_type="llama", qk_norm=False)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    groups = draw(st.integers(1, 9))
    config = ModelConfig(
        vocab_size=draw(st.integers(1, 300)),
        hidden_size=draw(st.integers(1, 64)),
        intermediate_size=draw(st.integers(1, 5000)),
        num_hidden_layers=2,
        num_attention_heads=groups * draw(st.integers(1, 4)),
        num_key_value_heads=groups,
        head_dim=2 * draw(st.integers(1, 8)),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
    )
    return config, draw(st.integers(1, groups))


@given(models(), st.sampled_from(["bytes", "regions"]))
def test_matrices_are_held_exactly_once_and_small_things_by_all(drawn: tuple[ModelConfig, int], balance: str) -> None:
    config, world_size = drawn
    plan = ShardPlan.balanced(config, world_size, balance)  # type: ignore[arg-type]
    held: dict[tuple[str, str], np.ndarray] = {}
    for rank in range(world_size):
        for parameter, parts in slices_of_rank(config, plan, rank).items():
            for part in parts:
                count = held.setdefault((parameter, part.name), np.zeros(part.shape, np.int8))
                count[
                    np.s_[part.rows.start : part.rows.stop] if part.columns is None else np.ix_(part.rows, part.columns)
                ] += 1
    for (parameter, _), count in held.items():
        replicated = parameter == "embed.weight" or "norm" in parameter
        assert (count == (world_size if replicated else 1)).all()
    names = {name for _, name in held}
    assert config.num_hidden_layers * (7 + 2) + 2 <= len(names)
    assert ("lm_head.weight" in names) != config.tie_word_embeddings


@given(models())
def test_bytes_tie_within_one_granule_unless_attention_alone_is_too_much(drawn: tuple[ModelConfig, int]) -> None:
    config, world_size = drawn
    plan = ShardPlan.balanced(config, world_size, "bytes")
    layers = [plan.n_elements(config, r) - plan.vocab[r] * config.hidden_size for r in range(world_size)]
    given_columns = [n for r, n in enumerate(layers) if plan.columns[r] > 0]
    granule = 32 if config.intermediate_size % 32 == 0 and config.intermediate_size >= 256 * world_size else 1
    slack = 2 * granule * 3 * config.hidden_size * config.num_hidden_layers
    assert max(given_columns) - min(given_columns) <= slack


@given(models())
def test_regions_are_each_as_even_as_they_can_be(drawn: tuple[ModelConfig, int]) -> None:
    config, world_size = drawn
    plan = ShardPlan.balanced(config, world_size, "regions")
    granule = 32 if config.intermediate_size % 32 == 0 and config.intermediate_size >= 256 * world_size else 1
    for shares, unit in ((plan.kv_groups, 1), (plan.columns, granule), (plan.vocab, 1)):
        assert max(shares) - min(shares) <= unit


@given(st.integers(0, 10_000), st.lists(st.floats(0, 100), min_size=1, max_size=9))
def test_apportion_adds_up_and_stays_within_one(total: int, shares: list[float]) -> None:
    counts = apportion(total, shares)
    assert sum(counts) == total
    weight = sum(shares)
    if weight > 1e-3:
        assert all(abs(c - total * s / weight) < 1 + 1e-6 for c, s in zip(counts, shares, strict=True))


def test_the_rank_with_fewer_heads_gets_more_columns() -> None:
    plan = ShardPlan.balanced(SMOL, 2, "bytes")
    assert plan.kv_groups == (2, 1)
    assert plan.columns[1] - plan.columns[0] == 192  # one head group holds as much as 170.7 columns; 32 at a time
    assert sum(plan.columns) == 1536
    text = plan.describe(SMOL)
    assert "0            6         2          672       24576  66.7 M (49.6 %)" in text
    assert len(text.splitlines()) == 3


@given(models(), st.data())
def test_more_ranks_than_groups_share_kv_heads(drawn: tuple[ModelConfig, int], data: st.DataObject) -> None:
    config, _ = drawn
    world_size = data.draw(st.integers(1, config.num_attention_heads))
    plan = ShardPlan.balanced(config, world_size)
    held = [plan.attention_of(config, rank) for rank in range(world_size)]
    assert [h for heads, _ in held for h in heads] == list(range(config.num_attention_heads))
    for rank, (heads, groups) in enumerate(held):
        assert {h // config.group_heads for h in heads} == set(groups)
        local = plan.local_config(config, rank)
        assert (local.num_attention_heads, local.num_key_value_heads) == (len(heads), len(groups))
    assert bool(plan.heads) == (world_size > config.num_key_value_heads)


def test_more_ranks_than_query_heads_names_the_nearest_plan() -> None:
    with pytest.raises(ValueError, match=r"10 ranks can't share 9 query heads.*the nearest legal plan has 9 ranks"):
        ShardPlan.balanced(SMOL, 10)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            lambda: ShardPlan((2, 2), (768, 768), (24576, 24576)).check(SMOL),
            r"plan 2/2 covers 4 KV-head groups; the model has 3",
        ),
        (
            lambda: ShardPlan((2, 1), (768, 700), (24576, 24576)).check(SMOL),
            r"plan 768/700 covers 1468 FFN columns; the model has 1536",
        ),
        (lambda: ShardPlan((3, 0), (768, 768), (24576, 24576)).check(SMOL), r"leaves a rank without a KV-head group"),
        (
            lambda: ShardPlan((1, 3), (768, 768), (24576, 24576), (2, 7)).check(SMOL),
            r"plan 2/7 gives rank 1 the query heads 2 to 8, which read 3 KV heads; heads of one KV head, or all of",
        ),
        (lambda: ShardPlan((1, 2), (768, 768), (24576, 24576), (9,)), "1 numbers of query heads .* 2 ranks"),
        (
            lambda: ShardPlan((2, 1), (768, 768), (49152,)),
            "one number per rank: 2 for KV groups, 2 for columns, 1 for vocabulary",
        ),
        (lambda: ShardPlan((2, 1), (-1, 1537), (24576, 24576)), "negative shares"),
    ],
)
def test_a_plan_that_does_not_fit_says_why(plan: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan()  # type: ignore[operator]
