"""Which rows of a chunk each rank computes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hostring.integrations.llm.model.apportion import apportion

MIN_ROWS = 2  # of each rank; a chunk that has fewer is computed by every rank for itself


@dataclass(frozen=True)
class RowPlan:
    """Each rank's share of a chunk's rows, in rank order; in any unit."""

    shares: tuple[float, ...]

    @property
    def world_size(self) -> int:
        return len(self.shares)

    def counts(self, n_rows: int) -> tuple[int, ...]:
        """Rows of each rank; empty where there are too few to divide."""
        found = apportion(n_rows, self.shares)
        return found if min(found) >= MIN_ROWS and self.world_size > 1 else ()

    def check(self, world_size: int) -> None:
        """Raise a ValueError unless a group of so many ranks can divide rows so."""
        if self.world_size != world_size:
            raise ValueError(
                f"{self.world_size} shares of rows for {world_size} ranks; give one share for each, or only --plan rows"
            )
        if min(self.shares) <= 0:
            raise ValueError(f"the shares {self.shares} leave a rank without rows; start the group without it")


def asks_for_rows(text: str) -> bool:
    """Whether a plan divides rows, as `row_plan` reads it."""
    return re.match(r"rows\s*(=|,|$)", text.strip()) is not None


def row_plan(text: str, world_size: int | None = None) -> RowPlan:
    """The plan that `text` asks for: "rows" for even shares, or shares such as "rows=78/22".

    Raises:
        ValueError: `text` says something else, or the ranks can't divide rows so.
    """
    found = re.fullmatch(r"rows(?:=([0-9.]+(?:/[0-9.]+)*))?", text.strip())
    if found is None:
        raise ValueError(f"the plan {text!r}: expected rows, or a share for each rank, such as rows=78/22")
    try:
        shares = tuple(map(float, found[1].split("/"))) if found[1] else (1.0,) * (world_size or 2)
    except ValueError:
        raise ValueError(f"the plan {text!r}: the shares are no numbers; give them as rows=78/22") from None
    plan = RowPlan(shares)
    plan.check(plan.world_size if world_size is None else world_size)
    return plan


def why_not_divided(plan: RowPlan, world_size: int, compute: str, *, compile: bool, same_bits: bool) -> str:
    """Why this rank can't divide rows so; empty when it can."""
    try:
        plan.check(world_size)
    except ValueError as exc:
        return str(exc)
    if compute == "packed":
        return "packed compute has no attention that begins at a rank's own rows; --plan rows needs --compute exact"
    if compile:
        return "torch can't compile attention that waits for other ranks; leave --compile or --plan rows out"
    if same_bits:
        return "same bits can't be promised with --plan rows: no rank has the logits of all steps, which are hashed"
    return ""
