"""`hostring xray`: two recorded runs stage by stage, and the first layer and operation where they part."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

_COMPARISON = "hostring.integrations.llm.xray.comparison"
_AROUND = 3  # stages that are listed before and after the one where the runs part


def add(app: typer.Typer) -> None:
    app.command()(xray)


def xray(
    a: Annotated[Path, typer.Argument(help="A run that was recorded with --xray FILE.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="The run to compare it with.", metavar="B")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Runs part where a stage differs by more than this part of its norm.")
    ] = 1e-4,
    every: Annotated[
        bool, typer.Option("--all", help="List every stage, and not only those around the first.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.")] = None,
) -> None:
    """Compare two recorded runs, and name the first layer and operation where they part.

    Record runs with `hostring demo --xray FILE` or `hostring generate --xray FILE`. The exit code is 1 when they part,
    or when one of them is faulty by itself.
    """
    from hostring.command_line import check_output, console, need, show_table

    need("numpy", "llm", "hostring xray")
    if json_file is not None:
        check_output(json_file, "--json")
    comparison = importlib.import_module(_COMPARISON)
    runs = [comparison.Run.read(file) for file in (a, b)]
    found = comparison.differences(*runs)
    bits, parted = (comparison.first_beyond(found, limit) for limit in (0.0, tolerance))
    faults = [f"{run.file}: {fault}" for run in runs for fault in run.faults()]
    weights = comparison.other_weights(*runs)
    out = console()
    show_table(out, _table(found if every else _around(found, parted or bits)))
    for line in _summary(found, bits, parted, tolerance, weights, faults):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        named = {"first_other_bit": bits, "parted": parted}
        figures: dict[str, Any] = {name: d and d.as_dict() for name, d in named.items()}
        figures |= {"tolerance": tolerance, "other_weights": weights, "faults": faults}
        figures["stages"] = [d.as_dict() for d in found]
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if parted is not None or faults:
        raise typer.Exit(1)


def _around(found: list[Any], one: Any) -> list[Any]:
    at = found.index(one) if one is not None else len(found) - 1
    return found[max(0, at - _AROUND) : at + _AROUND + 1]


def _table(found: list[Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("stage", "max abs error", "relative", "cosine", "top 1", "top 16"):
        table.add_column(heading, justify="left" if heading == "stage" else "right", overflow="fold")
    for d in found:
        figures = (f"{d.max_abs:.3g}", f"{d.relative:.2g}", f"{d.cosine:.9f}")
        table.add_row(str(d.stage), *figures, "same" if d.top1 else "other", f"{d.top16} of 16")
    return table


def _summary(
    found: list[Any], bits: Any, parted: Any, tolerance: float, weights: list[str], faults: list[str]
) -> list[str]:
    steps = 1 + max((d.stage.step for d in found), default=-1)
    lines = [f"{len(found)} stages of {steps} steps with the same input"]
    if bits is None:
        lines.append("the same bits in all of them")
    else:
        lines.append(f"first other bit: {bits.stage}")
        if parted is None:
            lines.append(f"no stage differs by more than {tolerance:g} of its norm")
        else:
            lines.append(f"the runs part at {parted.stage}: {parted.relative:.2g} of its norm")
    lines += [f"other weights, {name}" for name in weights]
    return [*lines, *faults]
