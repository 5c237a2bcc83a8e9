"""README's way to two machines, between two namespaces: one opens a cluster with a program, the other joins with its
token."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from two_hosts import Hosts

ROOT = Path(__file__).parent.parent.parent

pytest.importorskip("torch")


def start(hosts: Hosts, host: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", hosts.names[host], sys.executable, "-m", "hostring", "cluster", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.faults
def test_two_machines_generate_one_text(hosts: Hosts) -> None:
    """With the model that hostring bundles. Rank 0 prints the text. Both namespaces have one host name: hence
    --name."""
    prompt = "In the beginning"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f'hostring cluster init -n 2 -m -- hostring generate --prompt "{prompt}"' in readme
    assert "hostring cluster join -m TOKEN -- hostring generate" in readme

    generate = ("--", "hostring", "generate", "--max-tokens", "6")
    first = start(hosts, "a", "init", "-n", "2", "--name", "evo", "-m", *generate, "--prompt", prompt)
    second = None
    try:
        assert first.stdout is not None
        token = next(m[1] for line in first.stdout if (m := re.search(r"cluster join (\w+)", line)))
        second = start(hosts, "b", "join", "-m", token, "--name", "spark", *generate)
        said = second.communicate(timeout=90)[0]
        assert second.returncode == 0, said
        shown = first.communicate(timeout=90)[0]
        assert first.returncode == 0, shown
        assert "joined as rank 1 of 2" in said
        assert prompt in shown
        assert prompt not in said
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
