"""What `--plan` of demo and generate means: a file, or "even", "bytes", "auto" or "experts=place"."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.planning.ask import plan_for
from hostring.integrations.llm.planning.legal import check_legal
from hostring.integrations.llm.planning.model_file import read_model_file
from hostring.integrations.llm.planning.plan_file import PlanFile, read_plan

EVEN: Final = "even"
BYTES: Final = "bytes"
AUTO: Final = "auto"
PLACE: Final = "experts=place"


def plan_of_file(wish: str, path: Path, compute: str) -> PlanFile | None:
    """The plan in a file; None where `wish` is one of the words.

    Args:
        path: of the model. compute: "packed" takes whole units only.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it holds no plan for this model, or no legal one; names the nearest.
    """
    if wish in (EVEN, BYTES, AUTO, PLACE):
        return None
    model = read_model_file(path)
    plan = read_plan(wish, model.config)
    if compute == "packed" and model.units is not None:
        check_legal(plan.plan, model.units, wish)
    return plan


def plan_by_bytes(model: Path, n_ranks: int, compute: str) -> PlanFile:
    """All ranks hold the same bytes, as far as legal shares allow. Every rank finds the same.

    Raises:
        ValueError: more ranks than units.
    """
    choice = plan_for(model, n_ranks, compute=compute, tie="lanes")
    return PlanFile(choice.solution.plan, BYTES)


def plan_of_places(model: Path, n_ranks: int) -> PlanFile:
    """Whole experts on every rank.

    Raises:
        ValueError: the model has none, or more ranks than query heads.
    """
    return PlanFile(ShardPlan.placed(read_model_file(model).config, n_ranks), PLACE)
