"""`hostring doctor`: what stands in the way between these machines, and what to change."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hostring.launch.doctor import Finding

_STYLES = {"ok": "green", "look": "yellow", "bad": "red"}


def add(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    peer: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT where `hostring doctor --listen PORT` runs; may be repeated.")
    ] = None,
    listen: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Answer other doctors on this port until Ctrl-C; 0 picks one.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="How many ranks are to run on this host.")
    ] = None,
    token: Annotated[str | None, typer.Option(help="A join token to check.")] = None,
) -> None:
    """Check this host, and the links to others. The exit code is 1 when something will not work."""
    from hostring.launch.doctor import check_host, check_token
    from hostring.launch.link_check import check_peer
    from hostring.launch.token import Token

    if listen is not None:
        _answer(host, listen)
        return
    parsed = None if token is None else Token.parse(token)
    addresses = [_peer(address) for address in peer or ()]
    findings = list(check_host(ranks))
    if parsed is not None:
        findings.append(check_token(parsed))
    for address in addresses:
        findings += check_peer(*address)
    _show(findings)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


def _peer(text: str) -> tuple[str, int]:
    from hostring.transports.addresses import split_address

    try:
        return split_address(text)
    except ValueError as exc:
        raise ValueError(f"--peer {text!r}: {exc}; expected HOST:PORT") from None


def _answer(host: str, port: int) -> None:
    """Answer other doctors until Ctrl-C."""
    from hostring.launch.link_check import Listener
    from hostring.transports.addresses import join_address

    if not host:
        raise ValueError("can't listen on --host '': give an address of this host")
    try:
        listener = Listener(host, port)
    except (OSError, OverflowError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ValueError(
            f"can't listen on --host {host} --listen {port}: {reason}; give an address of this host"
        ) from None
    here = join_address(host, listener.port)
    typer.echo(f"answering on {here}; on the other machine: hostring doctor --peer {here}")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return
    finally:
        listener.close()


def _show(findings: Iterable[Finding]) -> None:
    """One line each, and one for advice, which is given once."""
    from rich.table import Table
    from rich.text import Text

    from hostring.command_line import console

    given: set[str] = set()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.verdict, _STYLES[finding.verdict]), f"{finding.what}: {finding.found}")
        if finding.advice and finding.advice not in given:
            table.add_row("", f"-> {finding.advice}")
            given.add(finding.advice)
    console().print(table)
