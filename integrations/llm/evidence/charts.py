"""Bar charts as inline SVG: no script, no request, and the page's own colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LINE, LABEL, WIDTH = 26, 250, 760  # pixels of a bar, of the names beside bars, and of a chart
_VALUE = 150  # room for the figure after a bar


@dataclass(frozen=True)
class Bar:
    """One bar. `parts`: lengths one after another, each in a colour of its own; `kind` is a CSS class."""

    name: str
    parts: Sequence[float]
    text: str
    kind: str = "ours"


def chart(title: str, bars: Sequence[Bar]) -> str:
    """Horizontal bars from zero, to one scale."""
    longest = max((sum(bar.parts) for bar in bars), default=0.0) or 1.0
    height = LINE * len(bars) + 8
    lines = [f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img">']
    lines.append(f"<title>{escape(title)}</title>")
    for n, bar in enumerate(bars):
        top, x = 4 + n * LINE, float(LABEL)
        lines.append(f'<text class="name" x="{LABEL - 10}" y="{top + 16}">{escape(bar.name)}</text>')
        for m, part in enumerate(bar.parts):
            width = (WIDTH - LABEL - _VALUE) * part / longest
            place = f'x="{x:.1f}" y="{top}" width="{max(width, 1):.1f}" height="{LINE - 8}"'
            lines.append(f'<rect class="{bar.kind} part{m}" {place}/>')
            x += width
        lines.append(f'<text class="value" x="{x + 8:.1f}" y="{top + 16}">{escape(bar.text)}</text>')
    return "\n".join([*lines, "</svg></figure>"])
