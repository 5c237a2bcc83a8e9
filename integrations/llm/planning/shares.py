"""One set of shares for given ranks: attention, MLP and head together, speed and memory with the KV cache together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb
from typing import Literal

from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.packed.plan import Units
from hostring.integrations.llm.planning.footprint import Footprint, groups_worth
from hostring.integrations.llm.planning.level import Lane, level, overflow
from hostring.integrations.llm.planning.model_file import ModelFile
from hostring.integrations.llm.planning.ranks import Line, PhaseCost, RankSpec

Phase = Literal["decode", "prefill"]
Tie = Literal["auto", "regions", "lanes"]

MAX_TRIED_CUTS = 400  # ways to cut attention; beyond that only those near the level one
_COLUMN_GRANULE = 32  # keeps block-quantised tensors from being read twice at the cuts


class DoesNotFit(ValueError):
    """No legal shares fit these ranks' memory. Says which rank, what it needs and what it offers."""


@dataclass(frozen=True)
class Solution:
    """Shares for a sequence of ranks, and what they cost.

    Attributes:
        plan: the shares. tie: what was levelled: each region, or the whole lanes.
        attention, mlp: seconds of each rank for one layer. head: for its vocabulary rows.
        step_s: of one token: the slowest rank of each region, and the collectives; None where speeds are not known.
    """

    plan: ShardPlan
    tie: str
    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    head: tuple[float, ...]
    step_s: float

    def lanes(self, n_layers: int) -> tuple[float, ...]:
        """Seconds that each rank computes for one token."""
        rows = zip(self.attention, self.mlp, self.head, strict=True)
        return tuple(n_layers * (a + m) + h for a, m, h in rows)


@dataclass(frozen=True)
class Problem:
    """What shares are wanted for.

    Attributes:
        model: the header. ranks: in rank order. footprints: of each.
        phase: whose time counts. collective_s: of one reduction among these ranks.
    """

    model: ModelFile
    ranks: Sequence[RankSpec]
    footprints: Sequence[Footprint]
    phase: Phase = "decode"
    collective_s: float = 0.0

    @property
    def group_borders(self) -> Sequence[int]:
        packed = packed_units(self.model, self.ranks)
        return _borders(packed[0]) if packed else range(self.model.config.num_key_value_heads + 1)

    @property
    def column_borders(self) -> Sequence[int]:
        packed, n = packed_units(self.model, self.ranks), self.model.config.intermediate_size
        if packed:
            return _borders(packed[1])
        granule = _COLUMN_GRANULE if n % _COLUMN_GRANULE == 0 and n >= 256 * len(self.ranks) else 1
        return range(0, n + 1, granule)

    def cost(self, rank: int) -> PhaseCost:
        """Seconds per token. Where nobody knows the speed, bytes stand for seconds."""
        spec, foot, n_layers = self.ranks[rank], self.footprints[rank], self.model.config.num_hidden_layers
        known = spec.decode if self.phase == "decode" else spec.prefill or spec.decode
        if known is not None:
            return known
        return PhaseCost(
            Line(0.0, foot.group / n_layers),
            Line(0.0, foot.read_share * foot.column / n_layers),
            Line(0.0, foot.vocab_row),
        )

    def room(self) -> dict[str, float]:
        """Bytes of each pool that the ranks' fixed parts leave."""
        left: dict[str, float] = {}
        for spec, foot in zip(self.ranks, self.footprints, strict=True):
            if spec.memory_nbytes is not None:
                offered = left.get(spec.pool, float(spec.memory_nbytes))
                left[spec.pool] = offered - foot.fixed
        return left


def packed_units(model: ModelFile, ranks: Sequence[RankSpec]) -> tuple[Units, Units] | None:
    """The units that shares must be whole in, when a rank computes packed."""
    if model.units is None or not any(spec.way.compute == "packed" for spec in ranks):
        return None
    return model.units.groups, model.units.columns


def solve(problem: Problem, tie: Tie = "auto") -> Solution:
    """The shares with the shortest step among those that fit.

    Raises:
        DoesNotFit: none fits.
        ValueError: more ranks than units; names the nearest legal plans.
    """
    if len(problem.ranks) > len(problem.group_borders) - 1 and packed_units(problem.model, problem.ranks) is None:
        return _with_shared_heads(problem)
    best: tuple[float, Solution] | None = None
    for groups in _attention_cuts(problem):
        for way in ("regions", "lanes") if tie == "auto" else (tie,):
            excess, found = _complete(problem, groups, way)
            if best is None or (excess, found.step_s) < (best[0], best[1].step_s):
                best = excess, found
    if best is None:
        raise ValueError(_too_many(problem))
    if best[0] > 0:
        raise DoesNotFit(_shortage(problem, best[1].plan))
    return best[1]


def _with_shared_heads(problem: Problem) -> Solution:
    """Even shares of more ranks than KV-head groups: each rank has some query heads, and a copy of their KV head."""
    plan = ShardPlan.balanced(problem.model.config, len(problem.ranks))
    needs: dict[str, int] = {}
    for rank, spec in enumerate(problem.ranks):
        needs[spec.pool] = needs.get(spec.pool, 0) + need_of(problem, plan, rank)
    if any(spec.memory_nbytes is not None and needs[spec.pool] > spec.memory_nbytes for spec in problem.ranks):
        raise DoesNotFit(_shortage(problem, plan))
    return evaluate(problem, plan, "regions")


def evaluate(problem: Problem, plan: ShardPlan, tie: str = "given") -> Solution:
    """What given shares cost."""
    costs = [problem.cost(rank) for rank in range(len(problem.ranks))]
    per_group = problem.model.config.group_heads
    attention = tuple(c.attention.seconds(groups_worth(plan, rank, per_group)) for rank, c in enumerate(costs))
    mlp = tuple(c.mlp.seconds(n) for c, n in zip(costs, plan.columns, strict=True))
    head = tuple(c.head.seconds(n) for c, n in zip(costs, plan.vocab, strict=True))
    n_layers = problem.model.config.num_hidden_layers
    n_collectives = 2 * n_layers + 1 if len(problem.ranks) > 1 else 0
    solution = Solution(plan, tie, attention, mlp, head, 0.0)
    duties = [spec.duty for spec in problem.ranks]
    # A rank under a quota runs at full speed until it has used it up, and saves it while it waits.
    together = n_layers * (max(attention) + max(mlp)) + max(head)
    busy = [n_collectives * spec.collective_cpu_s for spec in problem.ranks]
    alone = max((lane + b) / duty for lane, b, duty in zip(solution.lanes(n_layers), busy, duties, strict=True))
    step_s = max(together, alone) + n_collectives * problem.collective_s
    return Solution(plan, tie, attention, mlp, head, step_s)


def need_of(problem: Problem, plan: ShardPlan, rank: int) -> int:
    """Bytes that a rank needs for its share."""
    return problem.footprints[rank].need(plan, rank)


def _attention_cuts(problem: Problem) -> Iterator[tuple[int, ...]]:
    borders, n = problem.group_borders, len(problem.ranks)
    units = len(borders) - 1
    if n > units:
        return
    if comb(units - 1, n - 1) <= MAX_TRIED_CUTS:
        for cuts in reversed(
            list(combinations(borders[1:-1], n - 1))
        ):  # as even plans have it: more to the lower ranks
            yield tuple(b - a for a, b in pairwise((0, *cuts, borders[-1])))
        return
    yield level(borders, _lanes(problem, "attention"), problem.room(), 1)
    yield level(borders, [Lane(0.0, Line(0.0, 1.0))] * n, {}, 1)
    by_memory = [Lane(0.0, Line(0.0, 1 / (spec.memory_nbytes or 1))) for spec in problem.ranks]
    yield level(borders, by_memory, {}, 1)


def _lanes(problem: Problem, region: str, held: Sequence[float] | None = None) -> list[Lane]:
    """The ranks' time for one region at the speed that their quotas leave them."""
    lanes = []
    for rank, (spec, foot) in enumerate(zip(problem.ranks, problem.footprints, strict=True)):
        line: Line = getattr(problem.cost(rank), region)
        nbytes = {
            "attention": foot.group + foot.cache_group,
            "mlp": foot.column,
            "head": foot.vocab_row,
        }[region]
        line = Line(line.fixed / spec.duty, line.each / spec.duty)
        lanes.append(Lane(held[rank] if held else 0.0, line, nbytes, spec.pool))
    return lanes


def _complete(problem: Problem, groups: tuple[int, ...], tie: str) -> tuple[float, Solution]:
    """Columns and vocabulary for a cut of attention. Returns bytes that don't fit, and the shares."""
    room = problem.room()
    attention = _lanes(problem, "attention")
    excess = _take(room, attention, groups)
    mlp = _lanes(problem, "mlp", _done_before(problem, attention, groups) if tie == "lanes" else None)
    columns = level(problem.column_borders, mlp, room)
    excess += _take(room, mlp, columns)
    head = _lanes(problem, "head")
    vocab = level(range(problem.model.config.vocab_size + 1), head, room)
    excess += _take(room, head, vocab)
    return excess, evaluate(problem, ShardPlan(groups, columns, vocab), tie)


def _done_before(problem: Problem, attention: Sequence[Lane], groups: Sequence[int]) -> list[float]:
    """Seconds of a layer that each rank is busy with besides its MLP: attention, and two reductions."""
    busy = [2 * spec.collective_cpu_s / spec.duty if len(groups) > 1 else 0.0 for spec in problem.ranks]
    return [lane.seconds(n) + b for lane, n, b in zip(attention, groups, busy, strict=True)]


def _take(room: dict[str, float], lanes: Sequence[Lane], shares: Sequence[int]) -> float:
    """Take what the shares need from `room`. Returns bytes that were not there."""
    missing = overflow(lanes, tuple(shares), room)
    for lane, n in zip(lanes, shares, strict=True):
        if lane.pool in room:
            room[lane.pool] -= n * lane.nbytes
    for pool in room:
        room[pool] = max(0.0, room[pool])
    return missing


def _borders(units: Units) -> list[int]:
    return [0, *(unit.stop for unit in units)]


def _too_many(problem: Problem) -> str:
    units, n = len(problem.group_borders) - 1, len(problem.ranks)
    nearest = " or ".join(f"{k} rank{'s' * (k > 1)}" for k in (units, units - 1) if k >= 1)
    return (
        f"{n} ranks can't share {problem.model.config.num_key_value_heads} KV-head groups, of which "
        f"{units} cuts are legal for this file; the nearest legal plans have {nearest}"
    )


def _shortage(problem: Problem, plan: ShardPlan) -> str:
    needs: dict[str, int] = {}
    for rank, spec in enumerate(problem.ranks):
        needs[spec.pool] = needs.get(spec.pool, 0) + need_of(problem, plan, rank)
    offers = {spec.pool: spec.memory_nbytes for spec in problem.ranks if spec.memory_nbytes is not None}
    pool = max(offers, key=lambda p: needs[p] - (offers[p] or 0))
    who = " and ".join(f"rank {n} ({s.name})" for n, s in enumerate(problem.ranks) if s.pool == pool)
    total = sum(needs.values())
    every = sum(offers.values()) if len(offers) == len(needs) else None
    together = "" if every is None else f"; all ranks together need {_mb(total)} and offer {_mb(every)}"
    return (
        f"the model doesn't fit: at best {who} would need {_mb(needs[pool])} and offers {_mb(offers[pool] or 0)}"
        f"{together}. Add a rank or memory, shorten the cache (--max-seq), or take a smaller file"
    )


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
