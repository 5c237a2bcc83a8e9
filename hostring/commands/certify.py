"""`hostring certify`: proves the fold order of every schedule on symbols, and compares bits on real links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hostring.topologies.proof import Certificate
    from hostring.topologies.unit_proof import UnitProof

MAX_UNIT_RANKS = 8  # over which units are shared out, unless told otherwise: the splits grow threefold with each rank
SEGMENT = 8  # elements; short, so that small buffers have several segments and their borders are tried


def add(app: typer.Typer) -> None:
    app.command()(certify)


def sizes(world_size: int, segment: int = SEGMENT) -> list[int]:
    """Numbers of elements to try: none, fewer than ranks, odd ones, and around the borders of segments and chunks."""
    borders = (segment, 2 * segment, world_size * segment)
    return sorted({0, 1, 2, 3, *(border + d for border in borders for d in (-1, 0, 1))})


@dataclass
class Line:
    """What was shown for one topology, variant and order, over all world sizes.

    Attributes:
        wire: what the group declares.
        certificates: by world size. Each is of a buffer of one segment that divides evenly: it holds the plain costs.
        elements: how many were proven, on all ranks together.
        on_links: how many results were compared.
    """

    topology: str
    variant: str
    order: str
    wire: str = "float32"
    certificates: list[Certificate] = field(default_factory=list)
    elements: int = 0
    on_links: int = 0

    def prove(self, world_size: int) -> None:
        """Prove the order on symbols."""
        from hostring.topologies.proof import certify_all_reduce

        short, whole = self._segment, world_size * self._segment
        for n_elements, segment in [*((n, short) for n in sizes(world_size, short)), (whole, whole)]:
            shown = certify_all_reduce(
                self.topology, self.variant, self.order, world_size, n_elements, segment, self._unit
            )
            self.elements += world_size * n_elements
        self.certificates.append(shown)

    def compare(self, world_size: int) -> None:
        """Compare bits on links."""
        from hostring.bench.certify_links import certify_on_links

        of_this = (self.topology, self.variant, self.order, world_size, sizes(world_size, self._segment), self._segment)
        self.on_links += certify_on_links(*of_this, wire=self.wire)

    @property
    def _unit(self) -> int:
        from hostring.arrays.dtypes import unit_of

        return unit_of(self.wire)

    @property
    def _segment(self) -> int:
        return max(SEGMENT, self._unit)


def certify(
    max_ranks: Annotated[int, typer.Option(min=2, help="Try every number of ranks from 2 to this.")] = 8,
    links: Annotated[bool, typer.Option(help="Run the same on loopback TCP and compare bits.")] = True,
    wire: Annotated[
        str,
        typer.Option(
            help="What contributions are rounded to: float32 (not at all), bfloat16, mxint8[-both], mxfp4[-both]."
        ),
    ] = "float32",
    max_units: Annotated[
        int, typer.Option(min=1, help="Also prove the order over units, for every split of up to so many units.")
    ] = 16,
    max_unit_ranks: Annotated[
        int | None, typer.Option(min=1, help="Over up to so many ranks. [default: --max-ranks, at most 8]")
    ] = None,
) -> None:
    """Prove every all-reduce's fold order and the order over units, and compare bits on links.

    The exit code is 1 when any element on any rank is folded in another order than declared.
    """
    from hostring.command_line import console, show_table
    from hostring.group.contract import contract
    from hostring.topologies.proof import combinations
    from hostring.topologies.unit_proof import UnitProof

    unit_ranks = min(max_ranks, MAX_UNIT_RANKS) if max_unit_ranks is None else max_unit_ranks
    contract("auto", "rank", wire)  # refuses an unknown wire
    lines = [Line(*names, wire) for names in combinations()]
    steps: list[tuple[Callable[[int], None], int]] = [
        (line.prove, n) for line in lines for n in range(2, max_ranks + 1)
    ]
    if links:
        steps += [(line.compare, n) for line in lines for n in range(2, max_ranks + 1)]
    units = UnitProof()
    steps += [(partial(units.prove, max_ranks=unit_ranks), n) for n in range(1, max_units + 1)]
    out = console()
    _carry_out(steps, out)
    show_table(out, _table(lines, max_ranks, links))
    out.print(_summary(lines, max_ranks, links, wire), highlight=False, soft_wrap=True)
    out.print(_of_units(units, max_units, unit_ranks), highlight=False, soft_wrap=True)


def _carry_out(steps: list[tuple[Callable[[int], None], int]], out: Console) -> None:
    """Show progress, and end the command where something is not as declared."""
    from rich.progress import track

    from hostring.topologies.proof import NotCertified

    try:
        for step, number in track(steps, "certifying", console=out, transient=True):
            step(number)
    except NotCertified as exc:
        out.print(f"NOT CERTIFIED: {exc}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from exc


def _table(lines: list[Line], max_ranks: int, links: bool) -> Table:
    from rich.table import Table

    title = f"all_reduce of S bytes on N = 2 to {max_ranks} ranks: rounds, and bytes sent by the rank that sends most"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("\ntopology", "\nvariant", "\norder"):
        table.add_column(heading, no_wrap=True)
    table.add_column(f"rounds\nN=2 N={max_ranks}", justify="right")
    table.add_column(f"S per rank\nN=2   N={max_ranks}", justify="right")
    table.add_column("elements\nproven", justify="right")
    if links:
        table.add_column("same bits\non links", justify="right")
    for line in lines:
        first, last = line.certificates[0], line.certificates[-1]
        costs = (f"{first.rounds} {last.rounds:3}", f"{first.sent:.2f}  {last.sent:.2f}", f"{line.elements:,}")
        table.add_row(line.topology, line.variant, line.order, *costs, *([f"{line.on_links:,}"] if links else []))
    return table


def _summary(lines: list[Line], max_ranks: int, links: bool, wire: str) -> str:
    proven = (
        f"{len(lines)} combinations of topology, variant and order fold as declared, on every rank, "
        f"for every N from 2 to {max_ranks}"
    )
    if not links:
        return f"certified: {proven}."
    of = "" if wire == "float32" else f" of contributions rounded to {wire}"
    results = sum(line.on_links for line in lines)
    return f"certified: {proven}; {results} results over loopback TCP have the bits of the numpy fold{of}."


def _of_units(units: UnitProof, max_units: int, max_ranks: int) -> str:
    return (
        f"certified: {units.splits:,} splits of 1 to {max_units} units over 1 to {max_ranks} ranks, in every order of "
        f"ranks, complete the one tree over units; with up to {units.n_slots} slots."
    )
