"""One rank of a benchmark: makes the groups to compare, measures every point with all of them, and shows the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import hostring
from hostring.bench import report
from hostring.bench.cases import REDUCING, case
from hostring.bench.contenders import Contender, Gloo, Hostring
from hostring.bench.loop import Loop, decode_loop
from hostring.bench.measure import Effort, Session
from hostring.bench.options import Options, as_rules
from hostring.bench.sizes import show
from hostring.bench.truth import dtype_of

Report = Callable[[str], None]
Point = Callable[..., Iterator[Any]]
"""Called with a session and progress=…: measures one point and yields one row for each contender."""


def sweep(options: Options) -> int:
    """Measure everything that `options` ask for. A collective: all ranks call it. Returns the exit code."""
    effort = Effort(options.seconds, options.iterations, options.rounds, check=options.check)
    points = _points(options)
    rows: list[Any] = []
    with hostring.init(topology="mesh", order="rank") as comm:
        contenders = _contenders(options, comm)
        table = report.LoopTable() if options.decode_loop else report.Table()
        with _shown(comm.rank == 0, len(points)) as (say, advance):
            say(f"# {options.title(comm.world_size)}")
            for point in points:
                for row in point(Session(comm, contenders, effort), progress=advance):
                    rows.append(row)
                    for text in table.lines(row):
                        say(text)
                advance("")
            wrong = sum(row.wrong or 0 for row in rows)
            say(f"# wrong elements: {wrong}" + ("" if options.check else " (not checked)"))
        if comm.rank == 0:
            _write(options, rows, comm.world_size)
        for contender in contenders:
            contender.close()
    return 1 if wrong else 0


def _write(options: Options, rows: list[Any], world_size: int) -> None:
    if options.json:
        report.write_json(options.json, report.document(rows, {**options.as_dict(), "ranks": world_size}))
    if options.plot and not options.decode_loop:
        from hostring.bench.plot import plot

        plot(options.plot, rows, options.title(world_size))


def _points(options: Options) -> list[Point]:
    if options.decode_loop:
        loop = Loop.parse(options.decode_loop, options.gap_us, options.tokens)
        return [partial(decode_loop, loop=loop, dtype=dtype_of(name), order=options.order) for name in options.dtypes]
    return [
        partial(_measure, name=name, op=op, dtype=dtype, nbytes=nbytes, order=options.order)
        for name in options.names
        for dtype in options.dtypes
        for op in (options.ops if name in REDUCING else options.ops[:1])
        for nbytes in (options.nbytes if name != "barrier" else options.nbytes[:1])
    ]


def _measure(
    session: Session, progress: Report, *, name: str, op: str, dtype: str, nbytes: int, order: str
) -> Iterator[Any]:
    wanted = case(name, op, dtype_of(dtype), nbytes, session.comm.world_size, order)
    return session.rows(wanted, lambda what: progress(f"{name} {show(wanted.nbytes)}: {what}"))


def _contenders(options: Options, comm: hostring.Comm) -> list[Contender]:
    """One group for each combination of transport, wire and topology, then the peers, in one order on all ranks."""
    if options.array == "torch" or options.peers:
        import torch

        torch.set_num_threads(1)
    sides = (options.transports, options.wires, options.topologies)
    several = [len(names) > 1 for names in sides]
    found: list[Contender] = []
    for transport, wire, topology in product(*sides):
        told = zip((topology, wire, transport), reversed(several), strict=True)
        label = " ".join(name for name, differs in told if differs) or topology
        group = hostring.init(
            comm.rank,
            comm.world_size,
            topology=as_rules(topology),
            order=options.order,
            wire=wire,
            transport=transport,
            store=comm.session.group.store,  # where the first group met
        )
        found.append(Hostring(label, group, options.array))
    if options.peers:
        found.append(Gloo(comm))
    return found


@contextmanager
def _shown(speaks: bool, steps: int) -> Iterator[tuple[Report, Report]]:
    """(print a line, say what is going on), silent on all ranks but 0. Only a terminal gets a progress bar."""
    if not speaks:
        yield (lambda text: None), (lambda what: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(highlight=False, markup=False, soft_wrap=True)
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=steps)

        def advance(what: str) -> None:
            progress.update(task, advance=0 if what else 1, description=what)

        yield (lambda text: console.print(text)), advance
