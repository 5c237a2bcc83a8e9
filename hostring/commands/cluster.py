"""`hostring cluster`: machines on one network become one group, with a token instead of a configuration."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from typing import Annotated

import typer

from hostring.command_line import run

cluster = typer.Typer(help="Join machines into one group with a token.", no_args_is_help=True)
Program = Annotated[
    list[str] | None,
    typer.Argument(
        help="After --: what to run on this machine once all are here. Without: a check of the group.",
        metavar="[-- SCRIPT ARGS...]",
    ),
]
Name = Annotated[str | None, typer.Option(help="This machine's name in the cluster; its host name by default.")]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")]


def add(app: typer.Typer) -> None:
    app.add_typer(cluster, name="cluster")


@cluster.command()
def init(
    ranks: Annotated[
        int, typer.Option("-n", "--ranks", min=2, help="How many machines (ranks) there will be, with this one.")
    ],
    program: Program = None,
    module: Module = False,
    host: Annotated[
        list[str] | None, typer.Option(help="An address of this machine to offer; may be repeated.")
    ] = None,
    port: Annotated[int, typer.Option(help="Where to listen; 0 takes a free port.")] = 0,
    minutes: Annotated[float, typer.Option(help="How long the token lets others in.")] = 10.0,
    name: Name = None,
) -> None:
    """Open a cluster on this machine, as its rank 0, and show the token with which the others join."""
    open_cluster(ranks, program, module=module, host=host, port=port, minutes=minutes, name=name)


def open_cluster(
    ranks: int,
    program: list[str] | None,
    *,
    module: bool = False,
    host: list[str] | None = None,
    port: int = 0,
    minutes: float = 10.0,
    name: str | None = None,
    join_with: str = "",
) -> None:
    """Wait for the other machines, and run a program on this one.

    Args:
        join_with: the program that the others are told to run; they decide when it is empty.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from hostring.launch.cluster import Cluster

    name = _text(name or platform.node())
    opened = Cluster(ranks, name=name, hosts=host or (), port=port, lifetime=minutes * 60)
    console = Console()
    try:
        _show(str(opened.token), join_with)
        with contextlib.ExitStack() as stack:
            if not console.is_terminal:
                stack.callback(console.line)  # rich ends the last line of a live display on terminals only
            live = stack.enter_context(Live(console=console, refresh_per_second=4))

            def progress(here: dict[int, str], left: float) -> None:
                minutes, seconds = divmod(max(0, int(left)), 60)
                lines = [f"rank {r}  {here.get(r, '... not here yet')}" for r in range(ranks)]
                lines.append(f"{len(here)} of {ranks} here; the token expires in {minutes}:{seconds:02d}")
                live.update(Text("\n".join(lines)))

            opened.wait(progress)
        raise typer.Exit(_run(program, module, opened.place.environment()))
    finally:
        opened.close()


@cluster.command()
def join(
    token: Annotated[str, typer.Argument(help="What `hostring cluster init` shows.")],
    program: Program = None,
    module: Module = False,
    name: Name = None,
    again: Annotated[bool, typer.Option(help="Come back as the rank that this machine was.")] = False,
) -> None:
    """Join the cluster of a token, as its next free rank."""
    from hostring.launch.joining import join, wait_for_all
    from hostring.launch.token import Token

    place = join(Token.parse(token), _text(name or platform.node()), rejoins=again)
    typer.echo(f"joined as rank {place.rank} of {place.token.world_size}")
    if place.claim is not None:
        typer.echo("waiting for the others, for as long as the token lives")
    wait_for_all(place)
    raise typer.Exit(_run(program, module, place.environment()))


def _show(token: str, join_with: str) -> None:
    from hostring.commands.qr import Terminal, qr_code

    for line in qr_code(token, Terminal.standard_output()):
        typer.echo(line, color=True)  # it has colours only where they are welcome
    line = f"-m {token} -- {join_with}" if join_with else token
    typer.echo(f"\nOn each of the other machines:\n\n    hostring cluster join {line}\n")


def _text(name: str) -> str:
    """`name` as text: in an ASCII locale the bytes of other characters come as surrogates."""
    return os.fsencode(name).decode("utf-8", "replace")


def _run(program: list[str] | None, module: bool, environment: dict[str, str]) -> int:
    """Run the program as this machine's rank. The secret is in its environment, never on its command line."""
    from hostring.launch.exits import exit_code

    environment = {**os.environ, **environment}
    argv = ["-m", "hostring.commands.cluster"] if not program else (["-m", *program] if module else program)
    return exit_code(subprocess.run([sys.executable, *argv], env=environment, check=False).returncode)


def check() -> None:
    """What every rank runs when nothing else is asked for: do all hear each other, and how fast?"""
    import statistics
    import time

    import numpy as np

    import hostring

    with hostring.init() as comm:
        card = f"{platform.node()}, {platform.machine()}, Python {platform.python_version()}"
        cards = comm.gather_bytes(card.encode())
        small = np.full(1024, comm.rank, np.float32)
        times = []
        for _ in range(200):
            start = time.perf_counter()
            comm.all_reduce(small, "max")
            times.append(time.perf_counter() - start)
        if comm.rank == 0:
            for rank in range(comm.world_size):
                typer.echo(f"rank {rank}  {cards[rank].decode(errors='replace')}")
            median = statistics.median(times) * 1e6
            typer.echo(
                f"all {comm.world_size} ranks are connected; "
                f"an all_reduce of 4 KB takes {median:.0f} us (median of 200)"
            )


if __name__ == "__main__":
    run(check, "hostring")
