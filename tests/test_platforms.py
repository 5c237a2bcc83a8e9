"""What hostring says where it can't run, or where its checkout is broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port

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


RANK = """
import os, sys
import numpy as np
import hostring
rank, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
with hostring.init(timeout=30) as comm:
    total = comm.all_reduce(np.full(3, rank + 1.0, np.float32))
    taken = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
with open(path, "w", encoding="utf-8") as file:
    print(total[0], *taken, file=file)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads what descriptors lead to from /proc")
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "<&-", "2>&-"])
def test_closed_standard_streams_do_not_become_sockets(tmp_path: Path, closed: str) -> None:
    """Rank 0 runs the store, whose event loop ended the interpreter when it closed a descriptor below 3."""
    port, paths = str(free_port()), [tmp_path / str(rank) for rank in range(2)]
    shell = f'exec "$0" -c "$1" "$2" "$3" "$4" {closed}'
    running = [
        subprocess.Popen(["sh", "-c", shell, sys.executable, RANK, str(rank), port, str(path)])
        for rank, path in enumerate(paths)
    ]
    assert [process.wait(60) for process in running] == [0, 0]
    for path in paths:
        total, taken = path.read_text(encoding="utf-8").split(maxsplit=1)
        assert total == "3.0"
        assert "socket:" not in taken
        assert "anon_inode:" not in taken
