"""Files and pipes are read and written as UTF-8, whatever the locale says; and the demo runs where it is ASCII."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("hostring", "transports", "integrations", "benchmarks", "examples", "tests")
BINARY = ("os.open", "urllib.request.urlopen", "socket.socket", "webbrowser.open")  # these know no encoding


def without_encoding(source: str, pipes: bool = True) -> Iterator[str]:
    """Calls that open a file as text, or a pipe to a process, in the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) in BINARY:
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        given = {k.arg: k.value for k in node.keywords}
        if "encoding" in given or None in given:
            continue
        if name == "read_text":
            as_text = not node.args
        elif name == "write_text":
            as_text = len(node.args) < 2
        elif name in ("open", "fdopen"):
            at = 0 if isinstance(node.func, ast.Attribute) and name == "open" else 1
            mode = given.get("mode", node.args[at] if len(node.args) > at else ast.Constant("r"))
            as_text = not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
        elif name in ("run", "Popen", "check_output", "check_call"):
            as_text = pipes and ("text" in given or "universal_newlines" in given)
        elif name in ("NamedTemporaryFile", "TemporaryFile"):
            mode = given.get("mode", node.args[0] if node.args else ast.Constant("w+b"))
            as_text = not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
        else:
            continue
        if as_text:
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_text_files_have_an_encoding(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    pipes = folder != "tests"
    found = {str(f.relative_to(ROOT)): list(without_encoding(f.read_text(encoding="utf-8"), pipes)) for f in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "noticed"),
    [
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, mode='rb')", False),
        ("open(path, encoding='utf-8')", False),
        ("path.open()", True),
        ("path.open('rb')", False),
        ("path.read_text()", True),
        ("path.write_text(text)", True),
        ("path.write_text(text, encoding='ascii')", False),
        ("os.fdopen(fd, 'wb')", False),
        ("os.fdopen(fd, 'w')", True),
        ("tempfile.NamedTemporaryFile()", False),
        ("tempfile.NamedTemporaryFile('w')", True),
        ("os.open(path, os.O_RDONLY)", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command)", False),
    ],
)
def test_a_missing_encoding_is_noticed(source: str, noticed: bool) -> None:
    assert bool(list(without_encoding(source))) == noticed


def test_the_demo_shows_its_last_table_in_an_ascii_locale(tmp_path: Path) -> None:
    """Its tables hold a micro sign, a multiplication sign, and lines."""
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "hostring", "demo", "--max-tokens", "4", "--no-controls", "--json", "out.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **ascii_alone}, capture_output=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    shown = done.stdout.decode("ascii")
    assert "tokens" in shown
    assert "Traceback" not in done.stderr.decode("utf-8", "replace")
    assert (tmp_path / "out.json").read_text(encoding="utf-8")
