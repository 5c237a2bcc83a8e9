"""`hostring doctor`: what stands in the way between these machines, and what to change."""

from __future__ import annotations

import time
from typing import Annotated

import typer

MARKS = {"ok": "[green]ok[/]", "look": "[yellow]look[/]", "bad": "[red]bad[/]"}


def add(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    peer: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT where `hostring doctor --listen PORT` runs; may be repeated.")
    ] = None,
    listen: Annotated[int | None, typer.Option(help="Answer other doctors on this port until Ctrl-C.")] = None,
    host: Annotated[str, typer.Option(help="Where to listen: loopback unless told otherwise.")] = "127.0.0.1",
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="How many ranks are to run on this host.")
    ] = None,
    token: Annotated[str | None, typer.Option(help="A join token to check.")] = None,
) -> None:
    """Check this host, and the links to others. Ends with exit code 1 when something will not work."""
    from rich.console import Console
    from rich.table import Table

    from hostring.launch.cluster import Token
    from hostring.launch.doctor import Listener, check_host, check_peer, check_token
    from hostring.transports.addresses import join_address, split_address

    console = Console()
    if listen is not None:
        listener = Listener(host, listen)
        here = join_address(host, listener.port)
        console.print(f"answering on {here}; on the other machine: hostring doctor --peer {here}")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return
        finally:
            listener.close()
    table = Table("", "check", "found", "what to do", show_edge=False, pad_edge=False)
    findings = list(check_host(ranks))
    if token is not None:
        findings.append(check_token(Token.parse(token)))
    for address in peer or ():
        findings += check_peer(*split_address(address))
    for finding in findings:
        table.add_row(MARKS[finding.verdict], finding.what, finding.found, finding.advice)
    console.print(table)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)
