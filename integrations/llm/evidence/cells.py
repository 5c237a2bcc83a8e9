"""The cells of an evidence pack: what was measured, what was predicted, what is absent. None is a bare number."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Cell = dict[str, Any]


def measured(samples: Sequence[float | None], unit: str) -> Cell:
    """A figure that was measured: the median of its samples, which it keeps.

    Raises:
        ValueError: there is no sample, or one is missing: such a cell is absent.
    """
    found = [sample for sample in samples if sample is not None]
    if not found or len(found) != len(samples):
        raise ValueError(f"a measured cell needs samples, not {list(samples)}; use absent()")
    return {"kind": "measured", "value": statistics.median(found), "unit": unit, "samples": found}


def absent(why: str) -> Cell:
    """A figure that nobody has measured."""
    return {"kind": "absent", "why": why}


def predicted(value: float, unit: str) -> Cell:
    """A figure of the planner."""
    return {"kind": "predicted", "value": value, "unit": unit}


def ratio(above: Cell, below: Cell, unit: str) -> Cell:
    """The quotient of two cells that hold a value; absent where one of them is."""
    for cell in (above, below):
        if cell["kind"] not in ("measured", "derived"):
            return absent(cell.get("why", "it is predicted, not measured"))
    if not below["value"]:
        return absent("its divisor is 0")
    of = [above["value"], below["value"]]
    return {"kind": "derived", "value": of[0] / of[1], "unit": unit, "of": of}


def wrong(cell: Cell) -> str:
    """Why a cell can't hold what it says; empty when it can."""
    if cell["kind"] == "measured" and cell["value"] != statistics.median(cell["samples"]):
        return f"{cell['value']} is not the median of {cell['samples']}"
    if cell["kind"] == "derived" and cell["value"] != cell["of"][0] / cell["of"][1]:
        return f"{cell['value']} is not {cell['of'][0]} / {cell['of'][1]}"
    return ""
