"""Draws a sweep: latency with its spread and bus bandwidth over size, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostring.bench.measure import Row
from hostring.bench.sizes import show

MAX_SHADED = 3  # curves; more areas would hide each other
_STYLES = [
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
]


def check_format(path: str) -> None:
    """Raises: ValueError, when matplotlib can't write files with the ending of `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    ending = Path(path).suffix.lstrip(".").lower()
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if ending and ending not in known:  # without an ending matplotlib appends .png
        raise ValueError(f"--plot {path}: no format is called {ending!r}; use one of {', '.join(known)}")


def plot(path: str, rows: Sequence[Row], title: str) -> None:
    """Write `path`; its ending says in which format. One curve per contender, collective and dtype."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.case.nbytes:
            curves.setdefault((row.contender, row.case.collective, row.case.dtype.name), []).append(row)
    names = _names(list(curves))
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    latency, bandwidth = figure.subplots(1, 2)
    for k, (key, points) in enumerate(curves.items()):
        colour, marker = _STYLES[k % len(_STYLES)]
        dashes = "-" if k < len(_STYLES) else "--"
        x = [row.case.nbytes for row in points]
        style: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "markersize": 5,
            "linewidth": 1.6,
            "linestyle": dashes,
        }
        latency.plot(x, [row.p50 * 1e6 for row in points], label=names[key], **style)
        if len(curves) <= MAX_SHADED:
            least, late = [r.least * 1e6 for r in points], [r.p99 * 1e6 for r in points]
            latency.fill_between(x, least, late, color=colour, alpha=0.12, linewidth=0)
        bandwidth.plot(x, [row.case.busbw(row.p50) for row in points], label=names[key], **style)
    sizes = sorted({row.case.nbytes for points in curves.values() for row in points})
    shading = ", shaded from fastest to p99" if len(curves) <= MAX_SHADED else ""
    _axis(latency, f"Time per call: median{shading}", "microseconds", sizes)
    _axis(bandwidth, "Bus bandwidth", "GB/s", sizes)
    latency.legend(fontsize=9, framealpha=0.9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)


def _names(keys: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """The shortest labels that tell the curves apart."""
    kept = [i for i in range(3) if i == 0 or len({key[i] for key in keys}) > 1]
    return {key: " ".join(key[i] for i in kept) for key in keys}


def _axis(axis: Any, title: str, label: str, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    shown = sizes[:: max(1, -(-len(sizes) // 12))]
    axis.set_xticks(shown, [show(size) for size in shown])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("size (bytes)")
    axis.set_ylabel(label)
    axis.grid(True, which="major", alpha=0.35)
    axis.grid(True, which="minor", axis="y", alpha=0.12)
