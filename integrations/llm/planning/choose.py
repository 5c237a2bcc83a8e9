"""Which of the ranks take part: one is left out, by name, when the others are faster without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hostring.integrations.llm.planning.footprint import Footprint
from hostring.integrations.llm.planning.model_file import ModelFile
from hostring.integrations.llm.planning.predicted import Predicted
from hostring.integrations.llm.planning.ranks import RankSpec
from hostring.integrations.llm.planning.shares import DoesNotFit, Phase, Problem, Solution, Tie, evaluate, solve

CollectiveTime = Callable[[Sequence[int]], float]
"""Seconds of one reduction among the ranks of these numbers."""

Attempt = Callable[[tuple[int, ...]], tuple[Problem, Solution]]


@dataclass(frozen=True)
class LeftOut:
    """A rank that gets nothing, and why."""

    rank: int
    name: str
    why: str


@dataclass(frozen=True)
class Choice:
    """Who takes part, and with what.

    Attributes:
        problem, solution: of the ranks in `kept`. kept: their numbers among all ranks.
        left_out: the others.
        timed: speeds are known, so that seconds are seconds.
        alone: the fastest rank that holds the whole model by itself, and its seconds per token; None where none can.
        offered: all ranks that there are. collective_s: of one reduction among some of them.
    """

    problem: Problem
    solution: Solution
    kept: tuple[int, ...]
    left_out: tuple[LeftOut, ...]
    timed: bool
    alone: tuple[int, float] | None
    offered: Sequence[RankSpec]
    collective_s: CollectiveTime

    def other_phase(self, phase: Phase) -> Solution:
        """What the same shares cost in a phase."""
        return evaluate(replace(self.problem, phase=phase), self.solution.plan)


def choose(
    model: ModelFile,
    ranks: Sequence[RankSpec],
    collective_s: CollectiveTime = lambda kept: 0.0,
    *,
    phase: Phase = "decode",
    tie: Tie = "auto",
    max_seq: int | None = None,
    leave_out: bool = True,
) -> Choice:
    """The fastest plan over these ranks, or over some of them where speeds are known.

    Args:
        leave_out: False: all ranks take part.

    Raises:
        DoesNotFit: no legal plan fits. ValueError: more ranks than units.
    """
    timed = all(_known(spec, phase) for spec in ranks)

    def attempt(kept: tuple[int, ...]) -> tuple[Problem, Solution]:
        chosen = [ranks[r] for r in kept]
        feet = [Footprint.of(model, spec.way, max_seq) for spec in chosen]
        problem = Problem(model, chosen, feet, phase, collective_s(kept) if len(kept) > 1 else 0.0)
        return problem, solve(problem, tie)

    def slowness(rank: int) -> float:
        cost, config = ranks[rank].decode or ranks[rank].prefill, model.config
        assert cost is not None
        layer = cost.attention.seconds(config.num_key_value_heads) + cost.mlp.seconds(config.intermediate_size)
        return layer / ranks[rank].duty

    everyone = tuple(range(len(ranks)))
    if timed and leave_out:
        (problem, solution), left_out = _without_the_slow(everyone, ranks, attempt, slowness)
    else:
        (problem, solution), left_out = attempt(everyone), ()
    gone = {one.rank for one in left_out}
    kept = tuple(r for r in everyone if r not in gone)
    alone = _fastest_alone(everyone, attempt) if timed else None
    return Choice(problem, solution, kept, left_out, timed, alone, ranks, collective_s)


def _known(spec: RankSpec, phase: Phase) -> bool:
    return spec.decode is not None or (phase == "prefill" and spec.prefill is not None)


def _without_the_slow(
    kept: tuple[int, ...], ranks: Sequence[RankSpec], attempt: Attempt, slowness: Callable[[int], float]
) -> tuple[tuple[Problem, Solution], tuple[LeftOut, ...]]:
    """Leave out one rank after the other, the one whose leaving helps most, as long as it helps or is needed."""
    left_out: list[LeftOut] = []
    everyone = kept
    best, error = _tried(attempt, kept)
    while len(kept) > 1:
        tried = [(r, _tried(attempt, tuple(k for k in kept if k != r))[0]) for r in kept]
        fitting = [(found[1].step_s, r, found) for r, found in tried if found is not None]
        if fitting:
            step_s, rank, found = min(fitting, key=lambda row: row[:2])
            if best is not None and step_s >= best[1].step_s:
                break
            why = str(error) if best is None else _slower(best[1].step_s, step_s)
            best = found
        elif best is None and not isinstance(error, DoesNotFit):  # far too many ranks
            rank, why = max(kept, key=lambda r: (slowness(r), r)), str(error)
        else:
            break
        left_out.append(LeftOut(rank, ranks[rank].name, why))
        kept = tuple(k for k in kept if k != rank)
        if best is None:
            error = _tried(attempt, kept)[1]
    if best is None:
        assert error is not None
        raise error
    alone = _fastest_alone(everyone, attempt)
    if len(kept) > 1 and alone is not None and alone[1] < best[1].step_s:  # a smaller group is no way there
        why = _slower(best[1].step_s, alone[1])
        gone = [LeftOut(r, ranks[r].name, why) for r in kept if r != alone[0]]
        return attempt((alone[0],)), (*left_out, *gone)
    return best, tuple(left_out)


def _slower(with_it_s: float, without_it_s: float) -> str:
    with_it, without_it = (Predicted(1e3 * seconds, "ms") for seconds in (with_it_s, without_it_s))
    return f"a token would take {with_it} with it, {without_it} without it"


def _tried(attempt: Attempt, kept: tuple[int, ...]) -> tuple[tuple[Problem, Solution] | None, ValueError | None]:
    try:
        return attempt(kept), None
    except ValueError as exc:
        return None, exc


def _fastest_alone(kept: tuple[int, ...], attempt: Attempt) -> tuple[int, float] | None:
    fits = [(found[1].step_s, r) for r in kept if (found := _tried(attempt, (r,))[0]) is not None]
    return (min(fits)[1], min(fits)[0]) if fits else None
