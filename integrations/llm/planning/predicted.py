"""Figures that nobody has measured, marked as such wherever they are printed or written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LOWER_BOUND = "OPTIMISTIC LOWER BOUND"


@dataclass(frozen=True)
class Predicted:
    """A figure from a model of the machines. It is no number, so nothing can add it to a measured one.

    Attributes:
        value: in `unit`. unit: for people.
    """

    value: float
    unit: str

    def __str__(self) -> str:
        return f"predicted {self.value:,.4g} {self.unit}"

    def as_json(self) -> dict[str, Any]:
        return {"predicted": self.value, "unit": self.unit}


@dataclass(frozen=True)
class LowerBound:
    """Seconds below which no run on these machines can stay; most runs need more."""

    seconds: float

    def __str__(self) -> str:
        return f"{LOWER_BOUND} {1e3 * self.seconds:,.4g} ms"

    def as_json(self) -> dict[str, Any]:
        return {"predicted": self.seconds, "unit": "s", "label": LOWER_BOUND}
