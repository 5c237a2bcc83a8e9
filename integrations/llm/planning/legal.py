"""Shares that a file's units allow, nearest to those that somebody wished for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.packed.plan import UnitPlan, Units


def nearest_legal(plan: ShardPlan, units: UnitPlan) -> ShardPlan | None:
    """`plan` with every cut moved to the nearest border of a unit; None where there are more ranks than units."""
    if plan.world_size > len(units.groups):
        return None
    return ShardPlan(_moved(plan.kv_groups, units.groups, 1), _moved(plan.columns, units.columns, 0), plan.vocab)


def check_legal(plan: ShardPlan, units: UnitPlan, source: str) -> None:
    """Raise a ValueError that names the nearest legal plan unless all shares are whole units."""
    try:
        units.groups_per_rank(plan), units.columns_per_rank(plan)
    except ValueError as exc:
        legal = nearest_legal(plan, units)
        instead = (
            f"the nearest legal plan has {_slashed(legal.kv_groups)} KV-head groups and {_slashed(legal.columns)} "
            "columns"
            if legal
            else f"this file allows {len(units.groups)} ranks at most"
        )
        raise ValueError(f"{source} can't be computed packed: {exc}; {instead}; or compute exact") from exc


def _moved(shares: Sequence[int], units: Units, least: int) -> tuple[int, ...]:
    borders = [0, *(unit.stop for unit in units)]
    cuts = [0]
    for rank, stop in enumerate(list(accumulate(shares))[:-1], 1):
        at = bisect_left(borders, stop)
        if at and stop - borders[at - 1] <= borders[at] - stop:
            at -= 1
        cuts.append(min(max(at, cuts[-1] + least), len(units) - least * (len(shares) - rank)))
    return tuple(borders[b] - borders[a] for a, b in pairwise([*cuts, len(units)]))


def _slashed(shares: Sequence[int]) -> str:
    return "/".join(map(str, shares))
