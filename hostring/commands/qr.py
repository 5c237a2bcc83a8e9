"""A QR code for the terminal, where it can be shown whole and be scanned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

QUIET_ZONE = 2  # modules around the code; phones read it with 2, the standard asks for 4
_BLOCKS = {(False, False): " ", (True, False): "\u2580", (False, True): "\u2584", (True, True): "\u2588"}


@dataclass(frozen=True)
class Terminal:
    """What the QR code is written to.

    Attributes:
        shows: it is a terminal, and no file or pipe.
        colour: escape sequences are welcome.
        columns: its width.
        encoding: of what is written.
    """

    shows: bool
    colour: bool
    columns: int
    encoding: str

    @classmethod
    def standard_output(cls) -> Terminal:
        import os
        import shutil
        import sys

        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        shows = sys.stdout is not None and sys.stdout.isatty()
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        return cls(shows, shows and not plain, shutil.get_terminal_size().columns, encoding)


def qr_code(text: str, terminal: Terminal) -> list[str]:
    """The lines to print: the code, or one line that says why there is none, or nothing for a file."""
    if not terminal.shows:
        return []
    try:
        "".join(_BLOCKS.values()).encode(terminal.encoding)
    except (UnicodeEncodeError, LookupError):
        return [f"no QR code: this terminal's encoding, {terminal.encoding}, has no block characters"]
    import segno

    rows = [[bool(module) for module in row] for row in segno.make(text, error="l").matrix_iter(border=QUIET_ZONE)]
    if len(rows[0]) > terminal.columns:
        return [f"no QR code: it needs {len(rows[0])} columns, this terminal has {terminal.columns}"]
    return _drawn(rows, terminal.colour)


def _drawn(rows: Sequence[Sequence[bool]], colour: bool) -> list[str]:
    """Two rows of modules in each line. With colours, dark is black on white; without, only light modules are drawn."""
    light = [False] * len(rows[0])
    pairs = zip(rows[::2], [*rows[1::2], *([light] if len(rows) % 2 else [])], strict=True)
    if not colour:
        return ["".join(_BLOCKS[not a, not b] for a, b in zip(*pair, strict=True)) for pair in pairs]
    return ["\x1b[30;107m" + "".join(_BLOCKS[a, b] for a, b in zip(*pair, strict=True)) + "\x1b[0m" for pair in pairs]
