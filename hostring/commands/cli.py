"""The `hostring` command. Commands import what they need when they run, so that help comes at once."""

from __future__ import annotations

import typer

from hostring.command_line import run
from hostring.commands import (
    cache,
    certify,
    cluster,
    doctor,
    evidence,
    launch,
    model,
    plan,
    plan_map,
    plan_model,
    serve,
    top,
    trace,
    tune,
    xray,
)

app = typer.Typer(
    help="The same bits on every rank, over plain Ethernet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for group in (
    launch,
    certify,
    model,
    serve,
    top,
    cluster,
    cache,
    trace,
    doctor,
    tune,
    plan,
    plan_model,
    plan_map,
    xray,
    evidence,
):
    group.add(app)


def _version(wanted: bool) -> None:
    if wanted:
        from hostring import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """The same bits on every rank, over plain Ethernet."""


def main() -> None:
    """Run the command line."""
    run(app, "hostring")


if __name__ == "__main__":
    main()
