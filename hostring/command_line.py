"""What all commands share: output that any terminal can show, errors in one line, checks before the work starts."""

from __future__ import annotations

import codecs
import importlib.util
import io
import os
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hostring.errors import HostringError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FILE_COLUMNS: Final = 240
"""Width of tables that don't go to a terminal."""

BAD_INPUT: Final = 2
"""Exit code for what the user can put right, as typer has for options that don't exist."""

_ASCII_FORMS: Final = {
    "MICRO SIGN": "u",
    "GREEK SMALL LETTER MU": "u",
    "HORIZONTAL ELLIPSIS": "...",
    "MULTIPLICATION SIGN": "x",
    "LESS-THAN OR EQUAL TO": "<=",
    "GREATER-THAN OR EQUAL TO": ">=",
    "PLUS-MINUS SIGN": "+-",
    "RIGHTWARDS ARROW": "->",
    "LEFTWARDS ARROW": "<-",
    "NO-BREAK SPACE": " ",
}
"""By Unicode name."""


def ascii_form(character: str) -> str:
    """What to write for `character` where only ASCII can be written; "?" when nothing stands for it."""
    name = unicodedata.name(character, "")
    if name.startswith("BOX DRAWINGS"):
        return "+" if " AND " in name else "-" if name.endswith("HORIZONTAL") else "|"
    if name.endswith((" DASH", "HYPHEN", "MINUS SIGN")):
        return "-"
    if name.endswith("QUOTATION MARK"):
        return '"' if "DOUBLE" in name else "'"
    return _ASCII_FORMS.get(name, "?")


def _encode_anyway(error: UnicodeError) -> tuple[str | bytes, int]:
    """A codec error handler: writes a character that the encoding lacks in ASCII, or as "?"."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":  # a byte of a file name or an argument that is no text in this locale
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return ascii_form(character), error.start + 1


codecs.register_error("hostring.ascii", _encode_anyway)


def show_anywhere() -> None:
    """Let text that the locale can't encode come out in ASCII on standard output and error, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="hostring.ascii")


def run(command: Callable[[], object], name: str, *, speaks: Callable[[], bool] = lambda: True) -> None:
    """Run a command line. What a user can put right is one line without a traceback, and exit code 2.

    Args:
        command: does the work; may exit by itself.
        name: begins the line.
        speaks: whether this process, of all ranks that fail alike, is the one to print it.
    """
    show_anywhere()
    try:
        command()
    except (HostringError, ValueError, TypeError, OSError, ModuleNotFoundError) as exc:
        if speaks():
            print(f"{name}: {exc}", file=sys.stderr)
        sys.exit(1 if isinstance(exc, HostringError) else BAD_INPUT)


def console() -> Console:
    """Where commands print tables. Lines are as wide as the terminal; in a file they are as wide as they need to be."""
    from rich.console import Console

    found = Console(highlight=False, markup=False)
    if not found.is_terminal:
        found.width = FILE_COLUMNS
    return found


def show_table(console: Console, table: Table) -> None:
    """Print a table whole. Where it is wider than the terminal, its cells are listed: no figure is wrapped or cut."""
    from rich.measure import Measurement

    if Measurement.get(console, console.options.update(max_width=FILE_COLUMNS), table).maximum <= console.width:
        console.print(table)
        return
    headings = [" ".join(str(column.header).split()) for column in table.columns]
    if table.title:
        console.print(table.title)
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        console.print(f"{headings[0]} {cells[0]}".strip(), markup=False, highlight=False)
        for heading, cell in zip(headings[1:], cells[1:], strict=True):
            console.print(f"  {heading}: {cell}", markup=False, highlight=False)
    if table.caption:
        console.print(table.caption)


def need(module: str, extra: str, what: str) -> None:
    """Refuse to begin without an optional package.

    Raises:
        ModuleNotFoundError: `module` is not installed; says which command installs it.
    """
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ModuleNotFoundError(f"{what} needs {module}: pip install 'hostring[{extra}]'", name=module)


def check_output(path: str | Path, option: str) -> None:
    """Refuse a file that can't be written, before the work whose result it is to hold.

    Raises:
        ValueError: names the option, the file and what is wrong.
    """
    file = Path(path)
    if str(path) == "-":
        raise ValueError(f"{option} -: standard output has what people read; name a file, or /dev/stderr")
    if file.is_dir():
        raise ValueError(f"{option} {path}: this is a directory; name a file")
    if not file.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no directory {file.parent}; make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{option} {path}: this user may not write there")
