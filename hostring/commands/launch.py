"""`hostring launch`: the ranks of one machine."""

from __future__ import annotations

import math
import os
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
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

    _check_program(program[0], module)
    _check_choices(transport, topology, order, timeout)
    chosen = {"TRANSPORT": transport, "TOPOLOGY": topology, "ORDER": order, "TIMEOUT": timeout}
    env = {f"HOSTRING_{name}": str(value) for name, value in chosen.items() if value is not None}
    env["HOSTRING_LAUNCH_REJOIN"] = str(rejoin)  # tells a program whether a rank that died may come back
    revival = Rejoining(rejoin) if rejoin else None
    code = start(["-m", *program] if module else program, ranks, env=env, prefix_output=prefix, revival=revival)
    raise typer.Exit(code)


def _check_program(name: str, module: bool) -> None:
    """Refuse what Python would not find, once and not on every rank.

    Raises:
        ValueError: names the script or the module.
    """
    if module:
        if "/" in name or not _module_exists(name.partition(".")[0]):
            also = "; leave out -m to run a file" if name.endswith(".py") else ""
            raise ValueError(f"no module is called {name or repr(name)}{also}")
        return
    path = Path(name)
    if not name:
        raise ValueError("no script is called ''; give a Python file, or -m and a module")
    if name.startswith("-"):  # an option of Python's, such as -c
        return
    if not path.exists():
        raise ValueError(f"there is no script {name}")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ValueError(f"{name} holds no __main__.py, so Python can't run it; give a file")


def _module_exists(name: str) -> bool:
    try:
        return bool(name and (find_spec(name) or PathFinder.find_spec(name, [os.getcwd()])))
    except (ImportError, ValueError):
        return False


def _check_choices(transport: str | None, topology: str | None, order: str | None, timeout: float | None) -> None:
    """Refuse what every rank would refuse.

    Raises:
        ValueError: names the option, and what exists.
    """
    from hostring.bench.options import choose
    from hostring.topologies.rules import read_rules
    from hostring.transports.registry import TRANSPORTS

    if transport is not None:
        choose(transport, tuple(name for name in TRANSPORTS if name != "memory"), "--transport", one=True)
    if topology is not None or order is not None:
        links = topology or os.environ.get("HOSTRING_TOPOLOGY") or "auto"
        read_rules(links, order or os.environ.get("HOSTRING_ORDER") or "rank")
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"--timeout {timeout:g}: must be more than 0 seconds")
