"""`hostring top`: what a running `hostring serve` and its ranks do, as a table in the terminal."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

WAIT_S = 5.0  # for one answer of the server
_PHASES = ("compute", "stage", "wait", "transfer", "fold", "rest")
_MAX_EVENTS = 5  # the latest of them are shown
_BAR = 24  # characters of a rank's bar

Url = Annotated[str, typer.Argument(help="Where the server listens, as it printed it.")]
Key = Annotated[
    Path | None, typer.Option("--api-key-file", help="A file with a key that the server knows; its first line counts.")
]
Once = Annotated[bool, typer.Option("--once", help="Print one table and end, for pipes and scripts.")]
Every = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")]


def add(app: typer.Typer) -> None:
    app.command()(top)


def top(url: Url = "http://127.0.0.1:8000", api_key_file: Key = None, once: Once = False, every: Every = 1.0) -> None:
    """Show a running server: its ranks with devices, shares, memory and where their time goes, texts, and events.

    The figures are those of the page. They come from the server's /cluster, once a second.
    """
    from rich.console import Console
    from rich.live import Live

    headers = {} if api_key_file is None else {"Authorization": f"Bearer {_key(api_key_file)}"}
    console = Console()
    first = _view(url, headers)
    if once:
        console.print(_shown(first))
        return
    with Live(_shown(first), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(_look(url, headers), refresh=True)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _key(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"--api-key-file {path}: there is no such file")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file {path} holds no key; write one into it")
    return keys[0]


def _look(url: str, headers: dict[str, str]) -> Any:
    """What is shown now: the server, or why it can't be seen."""
    from rich.text import Text

    try:
        return _shown(_view(url, headers))
    except (OSError, ValueError) as exc:
        return Text(f"{exc}; trying again", style="red")


def _view(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """The server's figures.

    Raises:
        OSError: it does not answer. ValueError: it wants a key, or is no `hostring serve`.
    """
    where = url.rstrip("/")
    if "://" not in where:
        where = f"http://{where}"
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{where}/cluster", headers=headers), timeout=WAIT_S) as got:
            found: Any = json.load(got)
    except urllib.error.HTTPError as exc:
        exc.close()
        if exc.code == 401:
            raise ValueError(f"{where} wants a key: give --api-key-file, a file with one that it knows") from None
        raise ValueError(f"{where} answers {exc.code} {exc.reason}; is that a `hostring serve`?") from None
    except urllib.error.URLError as exc:
        raise OSError(f"no server answers at {where} ({exc.reason}); give the address that it printed") from None
    if not isinstance(found, dict) or "ranks" not in found:
        raise ValueError(f"{where}/cluster is not that of a `hostring serve`")
    return found


def _shown(view: dict[str, Any]) -> Any:
    from rich.console import Group

    return Group(_headline(view), _ranks(view), *_events(view))


def _headline(view: dict[str, Any]) -> Any:
    from rich.text import Text

    state = view["why_not"] or f"all {view['world_size']} ranks are here"
    guessed = f", {view['tokens_per_step']:.2f} tokens per step" if view["tokens_per_step"] > 1 else ""
    return Text.assemble(
        (f"{view['model']}  ", "bold"),
        (state, "red" if view["why_not"] else "green"),
        f"\n{view['tokens_per_s']:.1f} tokens/s, {view['steps_per_s']:.1f} steps/s{guessed}; {view['running']} texts "
        f"running, {view['waiting']} waiting; {view['generated_tokens']:,} tokens generated, "
        f"{view['cached_tokens']:,} prompt tokens kept\n",
    )


def _ranks(view: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "host", "device", "dtype", "share", "weights", "KV", "sent/s"):
        table.add_column(name, justify="left" if name in ("rank", "host", "device", "dtype") else "right", no_wrap=True)
    table.add_column(" ".join(f"{_letter(phase)} {phase}" for phase in _PHASES), no_wrap=True)
    table.add_column("waits for", no_wrap=True)
    known = {rank["rank"]: rank for rank in view["ranks"]}
    for number in range(view["world_size"]):
        lost = number in view["lost"]
        if number not in known:
            table.add_row(str(number), "lost" if lost else "-", style="red" if lost else None)
            continue
        rank = known[number]
        share, sent = f"{100 * rank['share']:.0f} %", _bytes(sum(rank["sent_per_s"].values()))
        what = (rank["host"], "lost" if lost else rank["device"], rank["dtype"], share)
        waits = "-" if rank["waits_for"] is None else f"rank {rank['waits_for']}"
        sizes = (_bytes(rank["bytes_held"]), _bytes(rank["kv_bytes"]), sent)
        table.add_row(str(number), *what, *sizes, _bar(rank["of_time"]), waits, style="red" if lost else None)
    return table


def _events(view: dict[str, Any]) -> list[Any]:
    from rich.text import Text

    latest = view["events"][-_MAX_EVENTS:]
    lines = [f"{time.strftime('%H:%M:%S', time.localtime(event['at']))}  {event['text']}" for event in latest]
    return [Text("\n" + "\n".join(lines))] if lines else []


def _letter(phase: str) -> str:
    """What stands for a phase in a bar."""
    return "·" if phase == "rest" else phase[0].upper()


def _bar(of_time: dict[str, float]) -> str:
    """Where a rank's time went: a letter for each 24th of it."""
    bar, passed = "", 0.0
    for phase in _PHASES:
        passed += of_time.get(phase, 0.0)
        bar += _letter(phase) * (min(_BAR, round(_BAR * passed)) - len(bar))
    return bar


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
