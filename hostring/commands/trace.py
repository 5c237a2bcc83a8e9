"""`hostring trace`: what the flight recorders wrote, as a table or for a trace viewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

_WORDS = ("collective", "schedule", "dtype")
_COLUMNS = ("#", *_WORDS, "elements", "sent", "received", "us", "waited us", "for rank")

_ROW = {
    "seq", "collective", "schedule", "dtype", "n_elements", "sent", "received", "started", "seconds", "wait",
    "waited_for",
}  # fmt: skip


def add(app: typer.Typer) -> None:
    app.command()(trace)


def trace(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files, or the directory, that ranks wrote with HOSTRING_DUMP=DIR.")
    ] = None,
    merge: Annotated[
        Path | None,
        typer.Option(help="Put all ranks of this directory on one time line: who delayed whom, and the critical path."),
    ] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write a trace for chrome://tracing or Perfetto here.")] = None,
    last: Annotated[int, typer.Option(min=1, help="How many operations of each rank to list.")] = 10,
) -> None:
    """Show each rank's last operations, and for whom it waited.

    With --merge, the ranks' clocks are compared by the calls that all of them recorded: no rank can end an all_reduce
    before all have begun it. Each delay is told once, with the rank where it began.
    """
    from hostring.command_line import check_output, console
    from hostring.commands.merged_trace import merge as merge_ranks
    from hostring.engine.recorder import chrome_trace

    given = [*(files or []), *([] if merge is None else [merge])]
    if not given:
        raise ValueError("name files, or the directory that ranks wrote with HOSTRING_DUMP=DIR; --merge DIR joins them")
    documents = _read_all(given)
    if chrome is not None:
        check_output(chrome, "--chrome")
    out = console()
    if merge is not None:
        documents = merge_ranks(documents, out, last)
    else:
        _print_each(documents, out, last)
    if chrome is not None:
        chrome.write_text(json.dumps(chrome_trace(documents)), encoding="utf-8")
        out.print(f"{sum(len(d['operations']) for d in documents)} operations of {len(documents)} ranks in {chrome}")


def _print_each(documents: list[dict[str, Any]], out: Console, last: int) -> None:
    from rich.table import Table

    from hostring.command_line import show_table

    for document in documents:
        title = f"{document['group']}, rank {document['rank']} of {document['world_size']}"
        table = Table(title=title, title_justify="left", caption=document["failure"], caption_justify="left")
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in _WORDS else "right", overflow="fold")
        for row in document["operations"][-last:]:
            late = "" if row["waited_for"] is None else str(row["waited_for"])
            times = (f"{row['seconds'] * 1e6:.1f}", f"{row['wait'] * 1e6:.1f}")
            words = (row["collective"], row["schedule"], row["dtype"])
            figures = (str(row[name]) for name in ("n_elements", "sent", "received"))
            table.add_row(str(row["seq"]), *words, *figures, *times, late)
        show_table(out, table)


def _read_all(given: list[Path]) -> list[dict[str, Any]]:
    paths = [p for name in given for p in (sorted(name.glob("hostring-*.json")) if name.is_dir() else [name])]
    if not paths:
        raise ValueError(f"no hostring-*.json in {', '.join(map(str, given))}; run the ranks with HOSTRING_DUMP=DIR")
    return [_read(path) for path in paths]


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not {"group", "rank", "world_size", "failure", "operations"} <= document.keys():
            raise ValueError("it lacks keys")
        for row in document["operations"]:
            if missing := _ROW - row.keys():
                raise ValueError(f"an operation lacks {', '.join(sorted(missing))}")
    except (ValueError, AttributeError, TypeError) as exc:
        raise ValueError(f"{path} is no flight record: {exc}") from exc
    result: dict[str, Any] = document
    return result
