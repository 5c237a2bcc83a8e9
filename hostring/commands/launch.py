"""`hostring launch`: the ranks of one machine."""

from __future__ import annotations

from typing import Annotated

import typer

_HERE = {"allow_interspersed_args": False}  # what follows the script are its own arguments


def add(app: typer.Typer) -> None:
    app.command(context_settings=_HERE)(launch)


def launch(
    program: Annotated[list[str], typer.Argument(help="A Python script and its arguments.", metavar="SCRIPT ARGS...")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="How many ranks to start.")],
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    transport: Annotated[str | None, typer.Option(help="auto, tcp, tls, unix or shm.")] = None,
    topology: Annotated[str | None, typer.Option(help="auto, mesh, ring, star or tree.")] = None,
    order: Annotated[str | None, typer.Option(help="Fold order: rank, ring or tree.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for start-up and for each operation.")] = None,
    rejoin: Annotated[
        int,
        typer.Option(
            min=0, help="How often in all failed ranks are started again to rejoin (see Comm.rebuild); never rank 0."
        ),
    ] = 0,
    prefix: Annotated[bool, typer.Option(help='Put "[rank] " before each line of output.')] = False,
) -> None:
    """Start a program as N ranks on this machine. The exit code is that of the rank that failed first."""
    from hostring.launch.ranks import launch as start
    from hostring.launch.restarts import Rejoining

    chosen = {"TRANSPORT": transport, "TOPOLOGY": topology, "ORDER": order, "TIMEOUT": timeout}
    env = {f"HOSTRING_{name}": str(value) for name, value in chosen.items() if value is not None}
    env["HOSTRING_LAUNCH_REJOIN"] = str(rejoin)  # tells a program whether a rank that died may come back
    revival = Rejoining(rejoin) if rejoin else None
    code = start(["-m", *program] if module else program, ranks, env=env, prefix_output=prefix, revival=revival)
    raise typer.Exit(code)
