"""The first screen of the README is true: its program, run by its launch line, prints its output."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_first_program_prints_what_the_readme_says(tmp_path: Path) -> None:
    command, *expected = block("console").splitlines()
    argv = shlex.split(command.removeprefix("$ "))
    assert argv[0] == "hostring"
    (tmp_path / argv[-1]).write_text(block("python"), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", *argv], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"rank [^\]]*\]", done.stdout)  # ranks print when they like, and may do so into one line
    assert sorted(lines) == sorted(expected)


def test_the_documents_it_names_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target


def test_the_commands_it_names_exist() -> None:
    from typer.main import get_command

    from hostring.commands.cli import app

    known = get_command(app).commands  # type: ignore[attr-defined]
    for line in re.findall(r"`(hostring [a-z]+)", README):
        assert line.split()[1] in known, line
