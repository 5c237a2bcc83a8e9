"""`hostring tune`: measures a group's links, tries its schedules, and keeps the result for later groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hostring.cost.network import Network
    from hostring.engine.session import Session
    from hostring.tuning.tables import Tuning


_WIDE = 170  # for a file, where nothing is cut


def add(app: typer.Typer) -> None:
    app.command()(tune)


Ranks = Annotated[int | None, typer.Option("-n", "--ranks", min=2, help="Start so many ranks here; 2 by default.")]
Sizes = Annotated[str, typer.Option(help="Sizes and ranges, such as 64B:16M (times 4 each).")]
Order = Annotated[str, typer.Option(help="Fold order: rank, ring or tree.")]
Links = Annotated[str, typer.Option(help="Whose links to tune: auto, mesh, ring, star or tree; or rules.")]
Transport = Annotated[str, typer.Option(help="auto, tcp, unix or shm. Groups of the same transport use the result.")]
Trials = Annotated[bool, typer.Option(help="Try the promising schedules; otherwise only measure links, and predict.")]
Seconds = Annotated[float, typer.Option(help="For one point of one round.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds.")]
Pin = Annotated[bool, typer.Option("--pin", help="Put rank r of this machine on core r.")]
Save = Annotated[
    bool | None,
    typer.Option(
        help="Keep the result for later groups on these hosts. By default, when a second measurement confirms it."
    ),
]
Output = Annotated[str, typer.Option(metavar="FILE", help="Save it here, for HOSTRING_TUNING=FILE, not in the cache.")]
Details = Annotated[
    bool, typer.Option("--details", help="Show every schedule that was tried, not only the chosen ones.")
]


def tune(
    ranks: Ranks = None,
    sizes: Sizes = "64B:16M",
    order: Order = "rank",
    topology: Links = "auto",
    transport: Transport = "auto",
    trials: Trials = True,
    seconds: Seconds = 0.02,
    rounds: Rounds = 5,
    pin: Pin = False,
    save: Save = None,
    output: Output = "",
    details: Details = False,
) -> None:
    """Measure links and schedules, and keep what is fastest.

    Runs under torchrun, mpirun, srun, hostring launch or RING_CONFIG on the hosts to be tuned; else starts ranks here.
    What was chosen is measured a second time. The exit code is 1 when that doesn't confirm it.
    """
    from hostring.bench.sizes import parse_sizes
    from hostring.topologies.rules import read_rules

    nbytes = parse_sizes(sizes)
    read_rules(topology, order)
    _start_ranks(ranks, pin)
    os.environ["HOSTRING_TUNING"] = "off"  # what is tuned are the defaults, not what an earlier run left
    import hostring

    group = hostring.init(topology=topology, order=order, transport=transport)
    with group as comm, _spoken(comm.rank == 0) as (console, say):
        found, doubts = _measure(comm.session, nbytes, trials, seconds, rounds, say)
        if comm.rank == 0:
            _show(console, comm.session, found, nbytes, details)
            _keep(console, comm.session, found, output, doubts, save)
    if doubts and not save:
        raise typer.Exit(1)


def _measure(
    session: Session, nbytes: list[int], trials: bool, seconds: float, rounds: int, say: Callable[[str], None]
) -> tuple[Tuning, list[str]]:
    """What was found, and why it should not be kept."""
    from hostring.tuning.recheck import recheck
    from hostring.tuning.trial import tune as tune_group

    found = tune_group(session, sizes=nbytes, measured=trials, seconds=seconds, rounds=rounds, say=say)
    return found, recheck(session, found, nbytes, seconds, say)


def _start_ranks(ranks: int | None, pin: bool) -> None:
    """Go on as one of the ranks that a launcher started; without one, start them, and exit when they have ended."""
    from hostring.group.config import started_as
    from hostring.launch.cores import pin as pin_to_core

    place = started_as(os.environ)
    if place is None:
        from hostring.launch.ranks import launch

        raise typer.Exit(launch(["-m", "hostring.commands.cli", *sys.argv[1:]], ranks or 2))
    if ranks not in (None, place.world_size):
        raise ValueError(f"--ranks {ranks}, but {place.by} says {place.world_size}; leave out --ranks")
    if pin:
        pin_to_core(place.local_rank if place.local_rank is not None else place.rank)


def _keep(
    console: Console, session: Session, found: Tuning, output: str, doubts: list[str], wanted: bool | None
) -> None:
    """Save `found` where it is to be saved, and say so.

    Args:
        doubts: see `recheck`. wanted: save it or not, whatever the doubts; None leaves it to them.
    """
    from hostring.tuning.saved import tuning_path
    from hostring.tuning.tables import save

    for doubt in doubts:
        console.print(f"not confirmed: {doubt}", soft_wrap=True)
    if wanted is False and not output:
        return
    if doubts and not wanted:
        console.print(
            "not saved: try again when nothing else runs on these hosts, with more --rounds or --seconds; "
            "--save keeps it all the same",
            soft_wrap=True,
        )
        return
    path = Path(output) if output else tuning_path(session)
    save(found, path)
    use = (
        f"HOSTRING_TUNING={output}"
        if output
        else "used from now on by groups on these hosts; HOSTRING_TUNING=off leaves it out"
    )
    console.print(f"saved to {path} ({use})", soft_wrap=True)


@contextmanager
def _spoken(speaks: bool) -> Iterator[tuple[Any, Any]]:
    """(a console, say what is going on), which are silent on all ranks but 0."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, quiet=not speaks)
    if not console.is_terminal:
        console.width = _WIDE
    if not console.is_terminal or not speaks:
        yield console, lambda what: None
        return
    with console.status("") as status:
        yield console, lambda what: status.update(what)


def _show(console: Console, session: Session, found: Tuning, sizes: list[int], details: bool) -> None:
    from hostring.command_line import show_table
    from hostring.group.host_info import usable_cores

    cores = len(usable_cores())
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 2 * max(cores, session.world_size):
        console.print(f"the load of this machine is {os.getloadavg()[0]:.1f}: the figures include what else runs here")
    for table in (
        links_table(found.network),
        matrix(session, found, sizes),
        errors_table(session, found, sizes, details),
    ):
        show_table(console, table)


def links_table(network: Network) -> Table:
    """Latency and rate of every link, and what the hosts cost."""
    from rich.table import Table

    table = Table("from", "to", "latency (us)", "rate (GB/s)", title="links")
    for (src, dst), line in sorted(network.special.items()):
        table.add_row(str(src), str(dst), f"{line.latency * 1e6:.1f}", _rate(line.rate))
    for h, host in enumerate(network.hosts):
        ranks = ", ".join(str(r) for r, home in enumerate(network.home) if home == h)
        table.add_section()
        costs = (
            f"{host.per_message * 1e6:.2f} us a message, {host.per_byte * 1e12:.0f} ps a byte, "
            f"folds {host.fold_rate / 1e9:.1f} GB/s"
        )
        table.add_row(
            f"ranks {ranks}", "", "", f"sends {_rate(host.send_rate)}, receives {_rate(host.recv_rate)}; {costs}"
        )
    return table


def _rate(rate: float) -> str:
    return "no limit" if rate == float("inf") else f"{rate / 1e9:.3f}"


def matrix(session: Session, found: Tuning, sizes: list[int]) -> Table:
    """What is chosen for every collective and size."""
    from rich.table import Table

    from hostring.bench.sizes import show
    from hostring.tuning.tables import choice_in

    collectives = list(session.tuner.allowed)
    chosen = found.table(session.tuner)
    table = Table("size", *collectives, title=f"chosen schedules: {session.world_size} ranks, order {session.order}")
    for nbytes in sizes:
        cells = [choice_in(chosen, c, nbytes) for c in collectives]
        table.add_row(show(nbytes), *cells)
    return table


def errors_table(session: Session, found: Tuning, sizes: list[int], details: bool) -> Table:
    """Prediction beside measurement of all-reduces, and what the choice loses against the best that was tried."""
    from rich.table import Table

    from hostring.bench.sizes import show
    from hostring.tuning.tables import choice_in

    chosen = found.table(session.tuner)
    table = Table(
        "size",
        "all_reduce by",
        "predicted (us)",
        "measured (us)",
        "error",
        "over the best",
        title="prediction and measurement",
    )
    for nbytes in sizes:
        name = choice_in(chosen, "all_reduce", nbytes)
        curves = [c for c in found.curves if c.collective == "all_reduce" and nbytes in c.predicted]
        curves.sort(key=lambda c: c.measured.get(nbytes, float("inf")))
        best = curves[0].measured.get(nbytes) if curves else None
        for curve in curves:
            if curve.name != name and (not details or nbytes not in curve.measured):
                continue
            predicted, measured = curve.predicted[nbytes], curve.measured.get(nbytes)
            mark = "" if not details or curve.name != name else " *"
            cells = [f"{predicted * 1e6:.1f}", "-", "-", "-"]
            if measured is not None and best is not None:
                cells[1:] = [
                    f"{measured * 1e6:.1f}",
                    f"{100 * (predicted / measured - 1):+.0f} %",
                    f"{100 * (measured / best - 1):.0f} %",
                ]
            table.add_row(show(nbytes), curve.name + mark, *cells)
    return table
