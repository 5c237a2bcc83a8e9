"""`hostring cluster`: machines on one network become one group, with a token instead of a configuration."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hostring.command_line import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hostring.launch.cluster import Cluster
    from hostring.launch.joining import Place
    from hostring.launch.token import Token

cluster = typer.Typer(help="Join machines into one group with a token.", no_args_is_help=True)
Program = Annotated[
    list[str] | None,
    typer.Argument(
        help="After --: what to run on this machine once all are here. Without: a check of the group.",
        metavar="[-- SCRIPT ARGS...]",
    ),
]
Name = Annotated[str | None, typer.Option(help="This machine's name in the cluster; its host name by default.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="Keeps the token: started again with the same file, this machine is found by those that were there.",
        dir_okay=False,
    ),
]
_SERVES = "hostring.integrations.llm.serve.joined"  # what a machine runs that joins with nothing but a token
_INTERRUPTED = 130  # exit code after Ctrl-C
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
    token_file: TokenFile = None,
) -> None:
    """Open a cluster on this machine, as its rank 0, and show the token with which the others join."""
    named = {"module": module, "host": host, "port": port, "minutes": minutes, "name": name, "token_file": token_file}
    open_cluster(ranks, program, **named)  # type: ignore[arg-type]


def open_cluster(
    ranks: int,
    program: list[str] | None,
    *,
    module: bool = False,
    host: list[str] | None = None,
    port: int = 0,
    minutes: float = 10.0,
    name: str | None = None,
    token_file: Path | None = None,
    job: bytes | None = None,
) -> None:
    """Wait for the other machines, and run a program on this one.

    Args:
        token_file: where the token of the last start is, to be used again, and that of this one goes.
        job: what the others run; they decide when not given.
    """
    opened = _opened(ranks, token_file, job, _text(name or platform.node()), host or (), port, minutes)
    try:
        _show(str(opened.token))
        _wait(opened)
        raise typer.Exit(_run(program, module, opened.place.environment()))
    finally:
        opened.close()


def _opened(
    ranks: int, token_file: Path | None, job: bytes | None, name: str, hosts: Sequence[str], port: int, minutes: float
) -> Cluster:
    """A new cluster, or one that goes on with the token of the last start."""
    from hostring.launch.cluster import Cluster
    from hostring.launch.token import read_token_file, write_token_file

    last = None if token_file is None else read_token_file(token_file)
    port = port or (last.addresses[0][1] if last else 0)
    secret = last.secret if last else None
    opened = Cluster(ranks, name=name, hosts=hosts, port=port, lifetime=minutes * 60, job=job, secret=secret)
    if token_file is not None:
        write_token_file(token_file, opened.token)
    return opened


def _wait(opened: Cluster) -> None:
    """Wait for all, and show who is here."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, ranks = Console(), opened.token.world_size
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


@cluster.command()
def join(
    token: Annotated[str, typer.Argument(help="What `hostring cluster init` shows.")],
    program: Program = None,
    module: Module = False,
    name: Name = None,
    again: Annotated[bool, typer.Option(help="Come back as the rank that this machine was.")] = False,
    device: Annotated[
        str, typer.Option(help="What this machine computes on, where the head says what to run: auto, cpu, cuda, ...")
    ] = "auto",
) -> None:
    """Join the cluster of a token, as its next free rank.

    Without a program, this machine does what the head wants: it serves its part of `hostring serve --machines`, gets
    what it needs of the model from the head, and stays until it is ended. It comes back by itself after a crash, a cut
    network or a restart of the head.
    """
    from hostring.launch.joining import join, wait_for_all
    from hostring.launch.token import Token

    parsed, name = Token.parse(token), _text(name or platform.node())
    if not program and not again:
        raise typer.Exit(_stay(parsed, name, device))
    place = join(parsed, name, rejoins=again)
    typer.echo(f"joined as rank {place.rank} of {place.token.world_size}")
    if place.claim is not None:
        typer.echo("waiting for the others, for as long as the token lives")
    wait_for_all(place)
    raise typer.Exit(_run(program, module, place.environment()))


def _stay(token: Token, name: str, device: str) -> int:
    """Do what the head wants, until this process is ended; or check the group, where it wants nothing."""
    from hostring.launch.child import run_child
    from hostring.launch.exits import exit_code
    from hostring.launch.staying import Staying

    def run(place: Place, job: bytes) -> int:
        task = {"HOSTRING_SERVE": json.dumps({"options": job.decode(), "device": device})}
        ended = exit_code(run_child(["-m", _SERVES], {**os.environ, **place.environment(), **task}))
        if ended == _INTERRUPTED:
            raise KeyboardInterrupt
        return ended

    try:
        staying = Staying(token, name, run, lambda text: print(text, flush=True))
        place, job = staying.first()
        if job is None:
            return _run(None, False, place.environment())
        staying.stay(place, job)
    except KeyboardInterrupt:
        return 130


def _show(token: str) -> None:
    from hostring.commands.qr import Terminal, qr_code

    for line in qr_code(token, Terminal.standard_output()):
        typer.echo(line, color=True)  # it has colours only where they are welcome
    typer.echo(f"\nOn each of the other machines:\n\n    hostring cluster join {token}\n")


def _text(name: str) -> str:
    """`name` as text: in an ASCII locale the bytes of other characters come as surrogates."""
    return os.fsencode(name).decode("utf-8", "replace")


def _run(program: list[str] | None, module: bool, environment: dict[str, str]) -> int:
    """Run the program as this machine's rank. The secret is in its environment, never on its command line."""
    from hostring.launch.child import run_child
    from hostring.launch.exits import exit_code

    environment = {**os.environ, **environment}
    argv = ["-m", "hostring.commands.cluster"] if not program else (["-m", *program] if module else program)
    return exit_code(run_child(argv, environment))


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
