"""Which heads and which positions each rank of a 2-D group holds: what `--plan context=3,heads=2` means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hostring.integrations.llm.model.apportion import apportion, even_columns
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan

BLOCK_POSITIONS = 16  # that follow each other in one shard of a KV cache


@dataclass(frozen=True)
class ContextPlan:
    """A grid of `context` x `heads` ranks; the same on all ranks.

    The ranks h * context … (h + 1) * context - 1 hold the same heads, the h-th part of all, and each of them holds
    every `context`-th block of the positions of their KV cache. The output projection, the MLP and the vocabulary are
    split over all ranks.
    """

    context: int
    heads: int

    @property
    def world_size(self) -> int:
        return self.context * self.heads

    def check(self, world_size: int) -> None:
        """Raise a ValueError unless the group has as many ranks."""
        if self.world_size != world_size:
            possible = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise ValueError(
                f"context={self.context},heads={self.heads} needs {self.world_size} ranks, and there are {world_size}; "
                "possible are " + ", ".join(f"context={n},heads={world_size // n}" for n in possible)
            )

    def shares(self, config: ModelConfig) -> ShardPlan:
        """What each rank holds of the weights.

        Raises:
            ValueError: the model has fewer query heads than parts are wanted.
        """
        by_heads, even = ShardPlan.balanced(config, self.heads), [1.0] * self.world_size
        plan = ShardPlan(
            self._for_each_rank(by_heads.kv_groups),
            even_columns(config.intermediate_size, even),
            apportion(config.vocab_size, even),
            self._for_each_rank(by_heads.heads),
            context=self.context,
        )
        plan.check(config)
        return plan

    def _for_each_rank(self, of_parts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n for n in of_parts for _ in range(self.context))


def is_context_plan(text: str) -> bool:
    """Whether `text` asks for ranks that share a KV cache, as `context_plan` reads it."""
    return re.match(r"(context|heads)\s*=", text.strip()) is not None


def context_plan(text: str, world_size: int | None = None) -> ContextPlan:
    """The plan that `text` asks for: "context=3,heads=2"; "context=3" for one part of heads per remaining rank.

    Args:
        world_size: ranks of the group, where that is known.

    Raises:
        ValueError: `text` says something else, or does not fit the group; names what does.
    """
    found: dict[str, int] = {}
    for word in text.replace(" ", "").split(","):
        key, _, value = word.partition("=")
        if key in found or key not in ("context", "heads") or not re.fullmatch(r"[1-9]\d*", value):
            raise ValueError(f"{word!r} in the plan {text!r}: expected context=SHARDS and heads=PARTS, each once")
        found[key] = int(value)
    given = next(iter(found.values()))
    rest = max(1, (world_size or given) // given)
    plan = ContextPlan(found.get("context", rest), found.get("heads", rest))
    if world_size is not None:
        plan.check(world_size)
    return plan


def why_not_shared(plan: ContextPlan, world_size: int, compute: str, *, compile: bool, same_bits: bool) -> str:
    """Why this rank can't take part in such a grid; empty when it can."""
    try:
        plan.check(world_size)
    except ValueError as exc:
        return str(exc)
    who = f"context={plan.context},heads={plan.heads}"
    if compute == "packed":
        return f"packed compute has no attention over ranks that share a KV cache; {who} needs --compute exact"
    if compile:
        return f"torch can't compile attention that waits for other ranks; leave --compile or {who} out"
    if same_bits:
        return f"same bits can't be promised with {who}: sums depend on how many ranks share a KV cache"
    return ""
