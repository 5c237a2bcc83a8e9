"""What it would cost to place experts whole, instead of cutting every expert over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.planning.choose import Choice
from hostring.integrations.llm.planning.predicted import Predicted


@dataclass(frozen=True)
class Placement:
    """One token's time either way.

    Attributes:
        most_used: of a token's experts, how many are on the rank with most of them, on average over all choices.
        placed_s, cut_s: seconds of one token.
    """

    most_used: float
    placed_s: float
    cut_s: float

    def in_words(self) -> str:
        placed, cut = (Predicted(1 / seconds, "tokens/s") for seconds in (self.placed_s, self.cut_s))
        return (
            f"--plan experts=place would give {placed}, because {self.most_used:.2f} of a token's experts are on one "
            f"rank on average; experts cut over the ranks give {cut}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "most_used": self.most_used,
            "placed": Predicted(1 / self.placed_s, "tokens/s").as_json(),
            "cut": Predicted(1 / self.cut_s, "tokens/s").as_json(),
        }


def placement(choice: Choice) -> Placement | None:
    """The price of decoding with experts placed whole, all equally often used; None for one rank, without experts,
    and where no speeds are known."""
    problem, config = choice.problem, choice.problem.model.config
    mixture, n_ranks = config.experts, len(problem.ranks)
    if mixture is None or n_ranks < 2 or not choice.timed or n_ranks > config.num_attention_heads:
        return None
    plan = ShardPlan.placed(config, n_ranks)
    most = most_used(plan.experts, mixture.used)
    cut = choice.other_phase("decode")
    columns = config.intermediate_size * most / mixture.used
    placed = max(problem.cost(rank).mlp.seconds(columns) for rank in range(n_ranks))
    return Placement(most, cut.step_s + config.num_hidden_layers * (placed - max(cut.mlp)), cut.step_s)


def most_used(per_rank: Sequence[int], used: int) -> float:
    """Of `used` different experts, how many the rank with most of them has, on average over all choices."""
    total = comb(sum(per_rank), used)
    at_most = [_ways(per_rank, used, most) / total for most in range(used + 1)]
    return sum(most * (at_most[most] - at_most[most - 1]) for most in range(1, used + 1))


def _ways(per_rank: Sequence[int], used: int, most: int) -> int:
    """Choices of `used` experts of which no rank has more than `most`."""
    ways = [1] + [0] * used
    for n in per_rank:
        ways = [sum(ways[k - i] * comb(n, i) for i in range(min(k, most, n) + 1)) for k in range(used + 1)]
    return ways[used]
