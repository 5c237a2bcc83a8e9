"""The `hostring` command. Commands import what they need when they run, so that help comes at once."""

from __future__ import annotations

import sys

import typer

from hostring.commands import certify, cluster, doctor, launch, model, plan, trace, tune
from hostring.errors import HostringError

app = typer.Typer(
    help="The same bits on every rank, over plain Ethernet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for group in (launch, certify, model, cluster, trace, doctor, tune, plan):
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
    """Run the command line. What a user can put right is a message without a traceback, and exit code 1."""
    try:
        app()
    except (HostringError, ValueError, FileNotFoundError, ModuleNotFoundError) as exc:
        print(f"hostring: {exc}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
