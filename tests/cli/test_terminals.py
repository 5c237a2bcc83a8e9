"""What commands draw: in a terminal of 40, 80 or 120 columns, without colours, and in a file."""

from __future__ import annotations

import io
import os
import re
import select
import subprocess
import sys
import time

import pytest
import segno
from rich.console import Console
from rich.table import Table

from hostring.command_line import show_table
from hostring.commands.certify import Line
from hostring.commands.certify import _table as certified
from hostring.commands.plan import points_table, price_point
from hostring.commands.qr import QUIET_ZONE, Terminal, qr_code
from hostring.commands.tune import links_table
from hostring.cost.network import ethernet
from hostring.launch.token import Token
from hostring.topologies.proof import combinations

TOKEN = str(Token((("192.168.77.1", 9002), ("fd00::2", 9002)), 3, 1_800_000_000, bytes(range(16))))
SIZE = segno.make(TOKEN, error="l").symbol_size(border=QUIET_ZONE)[0]


def modules(lines: list[str], dark: dict[str, tuple[bool, bool]]) -> list[list[bool]]:
    """Which modules are dark, read from what is drawn."""
    found = []
    for line in lines:
        pairs = [dark[c] for c in re.sub(r"\x1b\[[\d;]*m", "", line)]
        found += [[top for top, _ in pairs], [bottom for _, bottom in pairs]]
    return found[:SIZE]


INKED = {" ": (False, False), "\u2580": (True, False), "\u2584": (False, True), "\u2588": (True, True)}
LEFT_OUT = {c: (not top, not bottom) for c, (top, bottom) in INKED.items()}


@pytest.mark.parametrize("colour", [True, False], ids=["colour", "NO_COLOR"])
def test_the_code_is_drawn_module_by_module(colour: bool) -> None:
    lines = qr_code(TOKEN, Terminal(True, colour, SIZE, "utf-8"))
    expected = [[bool(m) for m in row] for row in segno.make(TOKEN, error="l").matrix_iter(border=QUIET_ZONE)]
    assert modules(lines, INKED if colour else LEFT_OUT) == expected
    assert all("\x1b" in line for line in lines) == colour
    assert any("\x1b" in line for line in lines) == colour


@pytest.mark.parametrize(
    ("terminal", "words"),
    [
        (Terminal(False, False, 80, "utf-8"), None),
        (Terminal(True, True, 30, "utf-8"), f"no QR code: it needs {SIZE} columns, this terminal has 30"),
        (Terminal(True, True, 80, "ascii"), "no QR code: this terminal's encoding, ascii, has no block characters"),
    ],
)
def test_where_it_can_t_be_scanned_there_is_none_and_a_reason(terminal: Terminal, words: str | None) -> None:
    assert qr_code(TOKEN, terminal) == ([words] if words else [])


def opened(columns: int, **variables: str) -> str:
    """What `hostring cluster init` shows in a terminal until it waits for others."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, "-m", "hostring", "cluster", "init", "-n", "2", "--host", "127.0.0.1"]
    unset = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment = {**unset, "TERM": "xterm-256color", "PYTHONUTF8": "1", **variables}
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown, end = b"", time.monotonic() + 60
    try:
        while not re.search(rb"cluster join \w+\s", shown) and time.monotonic() < end:
            if select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 1 << 16)
    finally:
        running.kill()
        running.wait()
        os.close(ours)
    return shown.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize(
    ("columns", "variables"), [(30, {}), (40, {}), (80, {}), (80, {"NO_COLOR": "1"}), (120, {"TERM": "dumb"})]
)
def test_a_cluster_s_code_in_a_terminal(columns: int, variables: dict[str, str]) -> None:
    before, _, after = opened(columns, **variables).partition("On each of the other machines")
    token = re.search(r"hostring cluster join (\w+)", after)
    assert token is not None
    assert ("\x1b[30;107m" in before) == (columns >= 40 and not variables)
    assert ("\u2588" in before) == (columns >= 40)
    assert ("no QR code: it needs" in before) == (columns == 30)


def test_a_cluster_s_token_in_a_file_has_no_escape_sequences() -> None:
    command = [
        sys.executable,
        "-m",
        "hostring",
        "cluster",
        "init",
        "-n",
        "2",
        "--host",
        "127.0.0.1",
        "--minutes",
        "0.01",
    ]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert b"hostring cluster join" in done.stdout
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"QR" not in done.stdout
    assert done.stdout.endswith(b"\n"), "what comes next begins a line of its own"


def drawn(table: Table, columns: int) -> str:
    file = io.StringIO()
    show_table(Console(file=file, width=columns, force_terminal=True, color_system=None), table)
    return file.getvalue()


def tables() -> dict[str, Table]:
    """One of each command that draws some."""
    points = [price_point(ethernet(n), 1 << 20) for n in (2, 3)]
    lines = [Line(*names) for names in list(combinations())[:2]]
    for line in lines:
        for n in (2, 3):
            line.prove(n)
    network = ethernet(3)
    wide = Table(*"abcdefgh", title="wide", caption="the caption")
    wide.add_row(*(f"{10 ** (k + 9) + k:,}" for k in range(8)))
    return {
        "plan": points_table(points),
        "certify": certified(lines, 3, True),
        "tune": links_table(network),
        "wide": wide,
    }


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("name", ["plan", "certify", "tune", "wide"])
def test_no_figure_is_wrapped_or_cut(name: str, columns: int) -> None:
    table = tables()[name]
    text = drawn(table, columns)
    assert "\u2026" not in text
    assert max(len(line) for line in text.splitlines()) <= columns
    for column in table.columns:
        for cell in map(str, column.cells):
            for figure in re.findall(r"[\d.,]*\d", cell):
                assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d,])", text), figure


def test_a_table_that_fits_is_a_table_and_a_list_says_what_is_what() -> None:
    wide = tables()["wide"]
    assert "b: 10,000,000,001" in drawn(wide, 80)
    assert "the caption" in drawn(wide, 80)
    assert "b:" not in drawn(wide, 200)
