"""Which layers and which ranks make up each stage of a pipeline."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan


@dataclass(frozen=True)
class Stage:
    """One stage: its number, its layers of the model, and its ranks of the group."""

    number: int
    layers: range
    ranks: range
    is_last: bool

    @property
    def is_first(self) -> bool:
        return self.number == 0


@dataclass(frozen=True)
class StagePlan:
    """How many layers and how many ranks every stage has, in order; the same on all ranks.

    The ranks of a stage share its layers by tensor parallelism. The first stage holds the embedding, the last the head.
    """

    layers: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return sum(self.ranks)

    @property
    def stages(self) -> list[Stage]:
        layers, ranks = _ranges(self.layers), _ranges(self.ranks)
        last = len(layers) - 1
        return [Stage(n, *both, n == last) for n, both in enumerate(zip(layers, ranks, strict=True))]

    def of_rank(self, rank: int) -> Stage:
        """The stage of `rank`."""
        return next(stage for stage in self.stages if rank in stage.ranks)

    @property
    def sha256(self) -> str:
        """The same on all ranks, or they would wait for each other in vain."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def check(self, config: ModelConfig, world_size: int) -> None:
        """Raise a ValueError unless this plan covers all layers of `config` and all ranks."""
        if sum(self.layers) != config.num_hidden_layers or min(self.layers) < 1:
            raise ValueError(
                f"stages of {_slashed(self.layers)} layers don't make up the model's {config.num_hidden_layers}; "
                "every stage needs at least one"
            )
        if self.world_size != world_size:
            raise ValueError(
                f"{len(self.ranks)} stages of {_slashed(self.ranks)} ranks need {self.world_size} ranks; the group has "
                f"{world_size}"
            )


def is_stage_plan(text: str) -> bool:
    """Whether `text` asks for stages, as `stage_plan` reads them."""
    return re.match(r"(pp|tp|layers)\s*=", text.strip()) is not None


def stage_plan(text: str, config: ModelConfig, world_size: int | None = None) -> StagePlan:
    """The plan that `text` asks for: "pp=3", "pp=2,tp=2", "tp=2" for one stage, or "pp=2,layers=10/20".

    Args:
        config: of the whole model.
        world_size: ranks of the group; without, each stage has `tp` ranks, or one.

    Raises:
        ValueError: `text` says something else, or what can't be; names the nearest that can.
    """
    wanted = _parsed(text)
    n_stages, n_layers = int(wanted["pp"]), config.num_hidden_layers
    if not 1 <= n_stages <= n_layers:
        raise ValueError(f"{n_stages} stages of a model with {n_layers} layers: from 1 to {n_layers} are possible")
    each = int(wanted.get("tp", (world_size or n_stages) // n_stages))
    if each < 1 or (world_size is not None and n_stages * each != world_size):
        possible = [n for n in range(1, min(n_layers, world_size or 1) + 1) if (world_size or 1) % n == 0]
        raise ValueError(
            f"{text}: {n_stages} stages of {max(1, each)} ranks each need {n_stages * max(1, each)} ranks, and there "
            f"are {world_size}; possible are " + ", ".join(f"pp={n},tp={(world_size or 1) // n}" for n in possible)
        )
    layers = tuple(map(int, wanted["layers"].split("/"))) if "layers" in wanted else balanced_layers(config, n_stages)
    if len(layers) != n_stages:
        raise ValueError(f"{text}: {len(layers)} numbers of layers for {n_stages} stages")
    plan = StagePlan(layers, (each,) * n_stages)
    plan.check(config, plan.world_size)
    return plan


def balanced_layers(config: ModelConfig, n_stages: int) -> tuple[int, ...]:
    """Layers of each stage, so that the weights that one token reads in the slowest stage are as few as possible.

    The last stage reads the head too, so it gets fewer layers.
    """
    n_layers = config.num_hidden_layers
    layers = ShardPlan((config.num_key_value_heads,), (config.intermediate_size,), (0,)).n_elements(config, 0)
    head = n_layers * config.vocab_size * config.hidden_size / layers  # reads as many weights as so many layers
    stages = n_stages - 1

    def slowest(at_last: int) -> float:
        return max(-(-(n_layers - at_last) // stages) if stages else 0, at_last + head)

    at_last = min(range(1, n_layers - stages + 1), key=slowest) if stages else n_layers
    before = n_layers - at_last
    stops = [round(before * n / stages) for n in range(stages + 1)] if stages else [0]
    return (*(b - a for a, b in pairwise(stops)), at_last)


def _parsed(text: str) -> dict[str, str]:
    patterns = {"pp": r"\d+", "tp": r"\d+", "layers": r"\d+(/\d+)*"}
    found: dict[str, str] = {}
    for word in text.replace(" ", "").split(","):
        key, _, value = word.partition("=")
        if key in found or key not in patterns or not re.fullmatch(patterns[key], value):
            raise ValueError(f"{word!r} in the plan {text!r}: expected pp=STAGES, tp=RANKS, layers=N/N/..., each once")
        found[key] = value
    return {"pp": "1", **found}


def _ranges(counts: Sequence[int]) -> list[range]:
    stops = [0, *accumulate(counts)]
    return [range(a, b) for a, b in pairwise(stops)]


def _slashed(counts: Sequence[int]) -> str:
    return "/".join(map(str, counts))
