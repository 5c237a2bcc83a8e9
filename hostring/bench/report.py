"""What a benchmark shows: a table while it runs, and a JSON document at the end."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hostring.bench.loop import LoopRow
from hostring.bench.measure import Row
from hostring.bench.sizes import show
from hostring.group.host_info import usable_cores

_COLUMNS = "{:>9} {:>10} {:>9} {:>5}  {:<15} {:<21} {:>9} {:>9} {:>9} {:>8} {:>8} {:>7} {:>6}"
_LOOP = "{:<15} {:<17} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>5} {:>7} {:>6}  {}"


class Table:
    """A sweep as lines of text, with a heading for each collective."""

    def __init__(self) -> None:
        self._collective = ""

    def lines(self, row: Row) -> list[str]:
        """The lines for one more row."""
        c = row.case
        wrong, ratio = "-" if row.wrong is None else str(row.wrong), "-" if row.ratio is None else f"{row.ratio:.2f}"
        times = [_figure(s * 1e6) for s in (row.p50, row.p99, row.least)]
        rates = [f"{c.algbw(row.p50):.3f}", f"{c.busbw(row.p50):.3f}"]
        names = show(c.nbytes), c.n_elements, c.dtype.name, c.op, row.contender, row.schedule
        return [*self._heading(c.collective), _COLUMNS.format(*names, *times, *rates, wrong, ratio)]

    def _heading(self, collective: str) -> list[str]:
        if collective == self._collective:
            return []
        self._collective = collective
        names = (
            "size",
            "count",
            "type",
            "op",
            "who",
            "schedule",
            "p50",
            "p99",
            "min",
            "algbw",
            "busbw",
            "#wrong",
            "ratio",
        )
        units = ("(B)", "(elements)", "", "", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "", "")
        return [f"# {collective}", _COLUMNS.format(*names), _COLUMNS.format(*units)]


class LoopTable:
    """Decode loops, as lines of text."""

    def __init__(self) -> None:
        self._begun = False

    def lines(self, row: LoopRow) -> list[str]:
        """The lines for one more row."""
        token = [_figure(s * 1e6) for s in (row.token_p50, row.token_p99, row.token_least)]
        call = [_figure(s * 1e6) for s in (row.call_p50, row.call_p99)]
        waited = (
            ", ".join(f"rank {rank} {s * 1e3:.1f}" for rank, s in sorted(row.waited_for.items(), key=lambda kv: -kv[1]))
            or "-"
        )
        wrong, ratio = "-" if row.wrong is None else str(row.wrong), "-" if row.ratio is None else f"{row.ratio:.2f}"
        share = f"{100 * row.collective_fraction:.0f}"
        names = row.contender, row.schedule
        return [
            *self._heading(),
            _LOOP.format(*names, *token, f"{1 / row.token_p50:.1f}", *call, share, wrong, ratio, waited),
        ]

    def _heading(self) -> list[str]:
        if self._begun:
            return []
        self._begun = True
        names = (
            "who",
            "schedule",
            "token p50",
            "p99",
            "min",
            "tokens/s",
            "call p50",
            "call p99",
            "coll",
            "#wrong",
            "ratio",
            "waited for",
        )
        units = ("", "", "(us)", "(us)", "(us)", "", "(us)", "(us)", "(%)", "", "", "(ms, all ranks together)")
        return [_LOOP.format(*names), _LOOP.format(*units)]


def _figure(value: float) -> str:
    return f"{value:.1f}" if value < 1e4 else f"{value:.0f}"


def document(rows: Sequence[Row | LoopRow], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything of one run, for a file."""
    return {"settings": settings, "environment": environment(), "rows": [row.as_dict() for row in rows]}


def environment() -> dict[str, Any]:
    """The machine and the software, as far as they affect the figures."""

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    cores = usable_cores()
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": len(cores) if len(cores) > 1 else os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: of(name) for name in ("hostring", "numpy", "torch")},
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def write_json(path: str, document: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
