"""Whether planned shares fit the memory that is left when a run starts: before a weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.planning.footprint import Footprint, Way
from hostring.integrations.llm.planning.memory_pool import find_pool
from hostring.integrations.llm.planning.model_file import read_model_file


@dataclass(frozen=True)
class Need:
    """What a rank needs, and what is left where it takes it from.

    Attributes:
        pool: ranks with the same one share it. nbytes: of weights and of one cache. offer: None: unknown.
    """

    pool: str
    nbytes: int
    offer: int | None


def need_here(path: str | Path, plan: ShardPlan, rank: int, way: Way, index: int = 0) -> Need:
    """What the share of `rank` needs on this machine.

    Args:
        way: its compute may be "auto". index: of the accelerator.
    """
    model = read_model_file(path)
    packed = way.device == "cpu" and model.units is not None and way.compute != "exact"
    pool, offer = find_pool(way.device, index)
    footprint = Footprint.of(model, Way("packed" if packed else "exact", way.dtype, way.device))
    return Need(pool, footprint.need(plan, rank), offer)


def check_fit(needs: Sequence[Need | None]) -> None:
    """Refuse what doesn't fit. needs: of each rank; None of one that has loaded already.

    Raises:
        ValueError: names the ranks of a pool that is too small, what they need and what it offers.
    """
    for pool in dict.fromkeys(need.pool for need in needs if need is not None):
        ranks = [rank for rank, need in enumerate(needs) if need is not None and need.pool == pool]
        mine = [need for need in needs if need is not None and need.pool == pool]
        total, offers = sum(need.nbytes for need in mine), [need.offer for need in mine if need.offer is not None]
        if offers and total > min(offers):
            who = f"rank {ranks[0]} needs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} together need"
            raise ValueError(
                f"{who} {total / 1e6:,.1f} MB for weights and the KV cache, and {min(offers) / 1e6:,.1f} MB are left "
                "there; plan again with what there is: --plan auto, or hostring plan model --memory"
            )
