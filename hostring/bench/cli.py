"""The command line of `hostring-bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hostring.bench.sizes import parse_sizes, show
from hostring.errors import HostringError

if TYPE_CHECKING:
    from hostring.bench.contenders import Contender

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def bench(
    collectives: Annotated[
        list[str] | None, typer.Argument(help="Which collectives: all_reduce (default), broadcast, …, or all.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Start so many ranks here; 2 when nothing started us.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Sizes and ranges: 64K, 4B:32M (times 4 each), 4B:32M:2.")] = "4B:32M",
    topology: Annotated[
        str, typer.Option(help="One or more, side by side: auto, mesh, ring, star, tree, mesh/two_shot, …")
    ] = "auto",
    order: Annotated[str, typer.Option(help="Fold order: rank, ring or tree.")] = "rank",
    dtype: Annotated[str, typer.Option(help="One or more dtypes.")] = "float32",
    op: Annotated[str, typer.Option(help="One or more of sum, avg, min, max, prod, band, bor, bxor.")] = "sum",
    wire: Annotated[str, typer.Option(help="One or more, side by side: float32, bfloat16, mxint8.")] = "float32",
    transport: Annotated[str, typer.Option(help="One or more, side by side: auto, tcp, unix, shm.")] = "auto",
    array: Annotated[str, typer.Option(help="What hostring gets: numpy or torch.")] = "numpy",
    peers: Annotated[str, typer.Option(help="Measure in the same rounds: gloo.")] = "",
    decode_loop: Annotated[
        str, typer.Option(metavar="LAYERS,HIDDEN", help="Not a sweep: two all-reduces per layer and token.")
    ] = "",
    gap_us: Annotated[float, typer.Option(help="With --decode-loop: computing time before each all-reduce.")] = 50.0,
    tokens: Annotated[int, typer.Option(help="With --decode-loop: tokens per round.")] = 50,
    seconds: Annotated[float, typer.Option(help="For one point of one round.")] = 0.1,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Instead of --seconds: calls of one point of one round.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 3,
    check: Annotated[bool, typer.Option(help="Compare results with an independent fold.")] = True,
    pin: Annotated[bool, typer.Option("--pin", help="Put rank r of this machine on core r.")] = False,
    json: Annotated[str, typer.Option(metavar="FILE", help="Write everything to a file.")] = "",
    plot: Annotated[str, typer.Option(metavar="FILE.png", help="Draw latency and bandwidth.")] = "",
) -> None:
    """Measure collectives: time (p50, p99, min of a call's slowest rank), algbw and busbw as in nccl-tests, and wrong elements.

    Runs inside torchrun, mpirun, srun or hostring launch; without one it starts the ranks itself. Ends with exit code 1 when
    a result was wrong.
    """
    options = dict(locals())
    from hostring.group.environment import launched
    from hostring.launch.cores import pin as pin_to_core

    _check(options)
    place = launched(os.environ)
    if place is None:
        from hostring.launch.ranks import launch

        raise typer.Exit(launch(["-m", "hostring.bench", *sys.argv[1:]], ranks or 2))
    if ranks not in (None, place.world_size):
        raise ValueError(f"--ranks {ranks}, but {place.by} started {place.world_size}; leave out --ranks")
    if pin:
        pin_to_core(place.local_rank if place.local_rank is not None else place.rank)
    raise typer.Exit(_run(options))


def _run(options: dict[str, Any]) -> int:
    """One rank of the benchmark. Returns the exit code."""
    import hostring
    from hostring.bench import report
    from hostring.bench.measure import Effort, Session

    effort = Effort(options["seconds"], options["iterations"], options["rounds"], check=options["check"])
    plan = _plan(options)
    with hostring.init(topology="mesh", order="rank") as comm:
        contenders = _contenders(options, comm)
        with _shown(comm.rank == 0, len(plan)) as (say, advance):
            say(f"# {_title(options, comm.world_size)}")
            rows: list[Any] = []
            table = report.LoopTable() if options["decode_loop"] else report.Table()
            for step in plan:
                for row in step(Session(comm, contenders, effort), advance):
                    rows.append(row)
                    for text in table.lines(row):
                        say(text)
                advance("")
            wrong = sum(row.wrong or 0 for row in rows)
            say(f"# wrong elements: {wrong}" + ("" if options["check"] else " (not checked)"))
        if comm.rank == 0:
            _write(options, rows, comm.world_size)
        for contender in contenders:
            contender.close()
    return 1 if wrong else 0


def _write(options: dict[str, Any], rows: list[Any], world_size: int) -> None:
    from hostring.bench import report

    if options["json"]:
        settings = {k: v for k, v in options.items() if k not in ("json", "plot")}
        report.write_json(options["json"], report.document(rows, {**settings, "ranks": world_size}))
    if options["plot"] and not options["decode_loop"]:
        from hostring.bench.plot import plot

        plot(options["plot"], rows, _title(options, world_size))


def _plan(options: dict[str, Any]) -> list[Any]:
    """One step per point: a function of a session and a progress callback that yields rows.

    Raises:
        ValueError: an unknown collective, dtype or operator.
    """
    from hostring.bench.cases import COLLECTIVES, REDUCING, case
    from hostring.bench.loop import Loop, decode_loop
    from hostring.bench.truth import DTYPES, OPS, dtype_of

    dtypes = _names(options["dtype"], DTYPES, "--dtype")
    ops = _names(options["op"], tuple(OPS), "--op")
    order = options["order"]
    if options["decode_loop"]:
        loop = Loop.parse(options["decode_loop"], options["gap_us"], options["tokens"])
        return [lambda s, p, d=d: decode_loop(s, loop, dtype_of(d), order, p) for d in dtypes]
    wanted = options["collectives"] or ["all_reduce"]
    names = list(COLLECTIVES) if wanted == ["all"] else _names(",".join(wanted), COLLECTIVES, "collective")
    nbytes = parse_sizes(options["sizes"])

    def step(session: Any, progress: Any, name: str, op: str, dtype: str, size: int) -> Any:
        wanted = case(name, op, dtype_of(dtype), size, session.comm.world_size, order)
        return session.rows(wanted, lambda what: progress(f"{name} {show(wanted.nbytes)}: {what}"))

    return [
        lambda s, p, a=(name, op, dtype, size): step(s, p, *a)
        for name in names
        for dtype in dtypes
        for op in (ops if name in REDUCING else ops[:1])
        for size in (nbytes if name != "barrier" else nbytes[:1])
    ]


def _names(text: str, known: tuple[str, ...], what: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in found if name not in known]
    if unknown or not found:
        raise ValueError(f"{what} {text!r}: use one or more of {', '.join(known)}")
    return found


def _contenders(options: dict[str, Any], comm: Any) -> list[Contender]:
    """Groups for all pairs of topology and transport, then the peers. Everyone makes them in the same order."""
    import hostring
    from hostring.bench.contenders import Gloo, Hostring

    if options["array"] == "torch" or options["peers"]:
        import torch

        torch.set_num_threads(1)
    sides = [[name.strip() for name in options[side].split(",")] for side in ("transport", "wire", "topology")]
    several = [len(names) > 1 for names in sides]
    found: list[Contender] = []
    for transport, wire, name in product(*sides):
        label = (
            " ".join(part for part, said in zip((name, wire, transport), reversed(several), strict=True) if said)
            or name
        )
        meet = {
            "rank": comm.rank,
            "world_size": comm.world_size,
            "store": comm._group.store,
        }  # where the first group met
        group = hostring.init(topology=_rule(name), order=options["order"], wire=wire, transport=transport, **meet)
        found.append(Hostring(label, group, options["array"]))
    if options["peers"]:
        found.append(Gloo(comm))
    return found


def _rule(name: str) -> str:
    """What `mesh/two_shot` is as a topology."""
    return f"{name.partition('/')[0]};all_reduce:{name}" if "/" in name else name


def _check(options: dict[str, Any]) -> None:
    """Refuse what can't be measured, before any rank is started.

    Raises:
        ValueError: names the option and what is possible.
    """
    from hostring.arrays.dtypes import WIRES
    from hostring.topologies.rules import read_rules

    _plan(options)
    for name in options["topology"].split(","):
        read_rules(_rule(name.strip()), options["order"])
    _names(options["wire"], tuple(WIRES), "--wire")
    if options["array"] not in ("numpy", "torch"):
        raise ValueError(f"--array {options['array']!r}: use numpy or torch")
    if options["peers"]:
        _names(options["peers"], ("gloo",), "--peers")


def _title(options: dict[str, Any], world_size: int) -> str:
    what = (
        f"decode loop {options['decode_loop']}"
        if options["decode_loop"]
        else ", ".join(options["collectives"] or ["all_reduce"])
    )
    pinned = ", pinned" if options["pin"] else ""
    arrays = f"{options['array']} {options['dtype']}"
    return f"{what}: {world_size} ranks, transport {options['transport']}, order {options['order']}, {arrays}{pinned}"


@contextmanager
def _shown(speaks: bool, steps: int) -> Iterator[Any]:
    """(print a line, say what is going on), on rank 0 only. The bar is for terminals; a file gets the lines as they come."""
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


def main() -> None:
    """Run the command line. What a user can put right is a message without a traceback, and exit code 1."""
    try:
        app(prog_name="hostring-bench")
    except (HostringError, ValueError, TypeError, ModuleNotFoundError) as exc:
        rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
        if rank == "0":
            print(f"hostring-bench: {exc}", file=sys.stderr)
        sys.exit(1)
