"""Draws the figures of docs/performance.md from its own tables, so that plot and table can't differ.

python benchmarks/draw_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20}


def rows_after(text: str, first_row: str) -> list[list[str]]:
    """The table whose header holds `first_row`: its rows as cells, header first, without the line of dashes."""
    start = text.index(first_row)
    table = text[text.rfind("\n\n", 0, start) :].strip().split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [row for row in rows if not set("".join(row)) <= {"-"}]


def nbytes(size: str) -> int:
    number, unit = size.split()
    return int(number) * UNITS[unit]


def draw(rows: list[list[str]], sizes: list[str], where: str, name: str) -> None:
    """Microseconds over bytes on logarithmic axes, a line for each of `rows`; written to docs/images/`name`.svg."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for label, *cells in rows:
        points = [
            (nbytes(size), float(re.match(r"[\d.]+", cell)[0])) for size, cell in zip(sizes, cells, strict=True) if cell
        ]  # type: ignore[index]
        axes.loglog(
            *zip(*points, strict=True),
            marker="o",
            markersize=4,
            label=label,
            linewidth=2.5 if "hostring" in label else 1.5,
        )
    axes.set(xlabel=f"size of the array, {where}", ylabel="median time of an all_reduce, µs")
    axes.set_xticks([nbytes(size) for size in sizes], sizes)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    (DOCS / "images").mkdir(exist_ok=True)
    figure.savefig(DOCS / "images" / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "hostring", "font.size": 10})
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    header, *rows = rows_after(text, "| C, spinning, TCP |")
    draw(rows, header[1:], "two ranks on one host", "one-host")
    header, *rows = rows_after(text, "| 1 Gbit/s | float32 |")
    draw([row[1:] for row in rows[:3]], header[2:], "two ranks on a link of 1 Gbit/s", "wires")


if __name__ == "__main__":
    main()
