"""Without the extra `llm`, the commands that need it say so in one line before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
sys.argv = {argv!r}
from hostring.commands.cli import main
main()
"""


@pytest.mark.parametrize("package", ["torch", "safetensors", "tokenizers", "jinja2", "gguf"])
@pytest.mark.parametrize("command", [("demo",), ("demo", "--ranks", "3", "--chat"), ("generate",)], ids=" ".join)
def test_a_missing_package_is_one_line_with_the_command_that_brings_it(package: str, command: tuple[str, ...]) -> None:
    code = BLOCKED.format(package=package, argv=["hostring", *command])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.splitlines() == [f"hostring: hostring {command[0]} needs {package}: pip install 'hostring[llm]'"]


@pytest.mark.parametrize("package", ["uvicorn", "llguidance"])
def test_serve_names_its_own_extra(package: str) -> None:
    code = BLOCKED.format(package=package, argv=["hostring", "serve"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == [f"hostring: hostring serve needs {package}: pip install 'hostring[serve]'"]
    assert done.returncode == 2


def test_generate_has_a_timeout() -> None:
    """With nobody to meet, it gives up when it was told to."""
    import os
    import time

    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    command = [sys.executable, "-m", "hostring", "generate", "--timeout", "1.5"]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode != 0
    assert "in time" in done.stderr, done.stderr
    assert time.monotonic() - begun < 30
