"""The README's program prints its output; files, tests, variables and commands that a page names exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hostring

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(ROOT.glob("docs/**/*.md"))
YOURS = {"hello.py", "train.py", "script.py"}  # files that a reader of these pages writes


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
        assert (ROOT / target).exists(), target


def test_the_commands_it_names_exist() -> None:
    from typer.main import get_command

    from hostring.commands.cli import app

    known = get_command(app).commands  # type: ignore[attr-defined]
    for line in re.findall(r"`(hostring [a-z]+)", README):
        assert line.split()[1] in known, line


def named(text: str, pattern: str) -> set[str]:
    """What matches `pattern` in the code of a page: between backticks, in fences, and on indented lines."""
    code = re.findall(r"```.*?```|`[^`]+`|^    [^\n]*", text, re.DOTALL | re.MULTILINE)
    return {name for part in code for name in re.findall(pattern, part)}


def missing_files(text: str) -> set[str]:
    """Paths of `text` that are not in the repository. A bare file name may be in any folder."""
    everywhere = {path.name for path in ROOT.rglob("*.py")}
    files = named(text, r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|c|toml|yml|cff))\b")
    folders = named(
        text, r"(?<![\w./-])((?:hostring|transports|integrations|tests|docs|examples|benchmarks)/[\w/]*)(?![\w.-])"
    )
    return {f for f in files - YOURS if not ((ROOT / f).exists() or ("/" not in f and f in everywhere))} | {
        folder for folder in folders if not (ROOT / folder).exists()
    }


@pytest.mark.skipif(not (ROOT / "hostring").exists(), reason="needs a checkout")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    assert not missing_files(page.read_text(encoding="utf-8"))


def test_a_file_that_does_not_exist_is_noticed() -> None:
    text = (
        "`hostring/no_such.py`, `test_no_such.py`, `hostring/nowhere/`, `oracle.py`\n\n    python benchmarks/none.py\n"
    )
    assert missing_files(text) == {"hostring/no_such.py", "test_no_such.py", "hostring/nowhere/", "benchmarks/none.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    sources = "\n".join(file.read_text(encoding="utf-8") for file in ROOT.glob("tests/**/*.py"))
    for name in named(page.read_text(encoding="utf-8"), r"\b(test_\w+)\b(?!\.py)"):
        assert f"def {name}(" in sources, name


def test_the_settings_page_names_every_variable_that_the_sources_read() -> None:
    package = Path(hostring.__file__).parent
    sources = [file for folder in (".", "transports", "integrations") for file in (package / folder).rglob("*.py")]
    read = {name for file in sources for name in re.findall(r"HOSTRING_[A-Z_]*[A-Z]", file.read_text(encoding="utf-8"))}
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert len(read) > 10
    assert read == set(re.findall(r"HOSTRING_[A-Z_]*[A-Z]", page))
