"""`hostring trace --merge`: the records of all ranks of a group as one story."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hostring.tracing.clocks import Clocks, compare, shifted
from hostring.tracing.culprits import LATE, critical_path, delays
from hostring.tracing.timeline import Timeline, side_by_side

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def merge(documents: Sequence[dict[str, Any]], out: Console, last: int) -> list[dict[str, Any]]:
    """Print one time line for each group. Returns the records on the clock of each group's lowest rank.

    Args:
        documents: of any ranks of any groups. last: how many calls and delays to list.
    """
    moved: list[dict[str, Any]] = []
    for group in sorted({document["group"] for document in documents}):
        of_group = sorted((d for d in documents if d["group"] == group), key=lambda d: int(d["rank"]))
        clocks = compare([d["operations"] for d in of_group])
        on_one_clock = shifted(of_group, clocks)
        moved += on_one_clock
        timeline = side_by_side(on_one_clock)
        out.print(f"{group}: ranks {', '.join(map(str, timeline.ranks))} of {of_group[0]['world_size']}", markup=False)
        _print_group(timeline, clocks, out, last)
        for failure in dict.fromkeys(d["failure"] for d in of_group if d["failure"]):
            out.print(f"failed: {failure}", markup=False)
    return moved


def _print_group(timeline: Timeline, clocks: Clocks, out: Console, last: int) -> None:
    from hostring.command_line import show_table

    out.print(clock_line(timeline, clocks), markup=False)
    if not timeline.n_calls:
        out.print("no call was recorded by all of them", markup=False)
        return
    show_table(out, _calls(timeline, last))
    show_table(out, _path(timeline))
    lines = delay_lines(timeline, last)
    for line in lines or ["no rank waited for another"]:
        out.print(line, markup=False, highlight=False)


def clock_line(timeline: Timeline, clocks: Clocks) -> str:
    """What was measured of the clocks."""
    if len(timeline.ranks) == 1:
        return "one rank only: no clocks to compare"
    if not clocks.n_calls:
        return "clocks were not compared: no all_reduce, all_gather or barrier was recorded by all ranks"
    told = zip(timeline.ranks[1:], clocks.offsets[1:], clocks.uncertainties[1:], strict=True)
    each = ", ".join(f"rank {rank} {offset * 1e6:+.0f} ± {unsure * 1e6:.0f} us" for rank, offset, unsure in told)
    return f"clocks set to that of rank {timeline.ranks[0]} by {clocks.n_calls} common calls: {each}"


def delay_lines(timeline: Timeline, last: int) -> list[str]:
    """One line for each of the longest delays."""
    lines = []
    for delay in delays(timeline)[:last]:
        rank, what, call = delay.cause
        before = f" after {timeline.name(call - 1)}" if what == LATE and call else ""
        waited = ", ".join(f"rank {timeline.ranks[r]} {s * 1e3:.1f} ms" for r, s in sorted(delay.waits.items()))
        culprit = f"rank {timeline.ranks[rank]} {what} {timeline.name(call)}{before}"
        lines.append(f"{delay.seconds * 1e3:.1f} ms: {culprit}; it kept waiting {waited}")
    return lines


def _calls(timeline: Timeline, last: int) -> Table:
    from rich.table import Table

    table = Table(title="the last calls", title_justify="left")
    for name in ("#", "collective", "schedule", "elements", "sent by all", "ms from the start", "us", "last to begin"):
        table.add_column(name, justify="left" if name in ("collective", "schedule") else "right", overflow="fold")
    for call in range(max(0, timeline.n_calls - last), timeline.n_calls):
        row, began, ended = timeline.rows[call][0], timeline.began[call], timeline.ended[call]
        sent = sum(of_rank["sent"] for of_rank in timeline.rows[call])
        words = (str(row["seq"]), row["collective"], row["schedule"], str(row["n_elements"]), str(sent))
        since = f"{(began.min() - timeline.began.min()) * 1e3:.3f}"
        table.add_row(
            *words, since, f"{(ended.max() - began.min()) * 1e6:.1f}", f"rank {timeline.ranks[began.argmax()]}"
        )
    return table


def _path(timeline: Timeline) -> Table:
    from rich.table import Table

    shares = critical_path(timeline)
    whole = sum(share.between + share.inside for share in shares.values()) or 1.0
    table = Table(title="the critical path", title_justify="left")
    for name in ("rank", "ms between calls", "ms inside calls", "share"):
        table.add_column(name, justify="right")
    for rank, share in sorted(shares.items()):
        part = f"{(share.between + share.inside) / whole:.0%}"
        table.add_row(str(timeline.ranks[rank]), f"{share.between * 1e3:.1f}", f"{share.inside * 1e3:.1f}", part)
    return table
