"""The command line of `hostring-bench`: reads options, refuses bad ones, starts the ranks or is one of them."""

from __future__ import annotations

import os
import sys

import typer

from hostring.bench import options as o
from hostring.command_line import run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def bench(
    collectives: o.Collectives = None,
    ranks: o.Ranks = None,
    sizes: o.Sizes = "4B:32M",
    topology: o.Topologies = "auto",
    order: o.Order = "rank",
    dtype: o.Dtypes = "float32",
    op: o.Ops = "sum",
    wire: o.Wires = "float32",
    transport: o.Transports = "auto",
    array: o.ArrayLibrary = "numpy",
    peers: o.Peers = "",
    decode_loop: o.DecodeLoop = "",
    gap_us: o.GapUs = 50.0,
    tokens: o.Tokens = 50,
    seconds: o.Seconds = 0.1,
    iterations: o.Iterations = None,
    rounds: o.Rounds = 3,
    check: o.Check = True,
    pin: o.Pin = False,
    json: o.Json = "",
    plot: o.Plot = "",
) -> None:
    """Measure collectives and check their results.

    The table shows the time of a call's slowest rank (p50, p99, min), algbw and busbw as nccl-tests counts them, and
    the number of wrong elements. Under torchrun, mpirun, srun, hostring launch or RING_CONFIG this is one rank; without
    a launcher it starts the ranks itself. The exit code is 1 when a result was wrong.
    """
    raise typer.Exit(_begin(o.Options(**locals())))


def _begin(options: o.Options) -> int:
    """Start the ranks, or be one. Returns the exit code."""
    from hostring.group.config import started_as

    options.check_all()
    place = started_as(os.environ)
    if place is None:
        from hostring.launch.ranks import launch

        return launch(["-m", "hostring.bench", *sys.argv[1:]], options.ranks or 2)
    if options.ranks not in (None, place.world_size):
        raise ValueError(f"--ranks {options.ranks}, but {place.by} says {place.world_size}; leave out --ranks")
    if options.pin:
        from hostring.launch.cores import pin

        pin(place.local_rank if place.local_rank is not None else place.rank)
    from hostring.bench.sweep import sweep

    return sweep(options)


def _is_rank_0() -> bool:
    """Whether this process reports what all ranks know."""
    ranks = (os.environ.get(name) for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    return next((rank for rank in ranks if rank), "0") == "0"


def main() -> None:
    """Run the command line."""
    run(lambda: app(prog_name="hostring-bench"), "hostring-bench", speaks=_is_rank_0)
