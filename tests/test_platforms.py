"""What hostring says where it can't run, or where its checkout is broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hostring

PACKAGE = Path(hostring.__file__).parent


@pytest.mark.parametrize("name", ["transports", "integrations"])
def test_text_files_in_place_of_links_are_explained_in_one_line(tmp_path: Path, name: str) -> None:
    """As git leaves them with core.symlinks=false, and some tools that unpack archives."""
    copy = tmp_path / "hostring"
    ignored = shutil.ignore_patterns("transports", "integrations", "__pycache__")
    shutil.copytree(PACKAGE, copy, ignore=ignored)
    (copy / name).write_text(f"../{name}", encoding="utf-8")
    code = "import hostring"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"ImportError: {copy / name} is a text file and should be a symbolic link to ../{name}:")
    assert "git clone -c core.symlinks=true" in last


def test_another_system_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match=r"^hostring runs on Linux and macOS, and this is win32; [^\n]*WSL 2$"):
        hostring.init(0, 1)
