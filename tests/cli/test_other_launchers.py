"""The same program under mpirun and torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ADD_UP, script
from mpis import mpi

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("starter", "options"),
    [
        (mpi("mpich", "mpiexec.hydra"), []),
        (
            mpi("openmpi", "prterun") and mpi("openmpi", "mpirun"),
            ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
        ),
    ],
    ids=["mpich", "openmpi"],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_mpirun_starts_the_same_program(starter: str | None, options: list[str], wrapped: bool, tmp_path: Path) -> None:
    if starter is None:
        pytest.skip("this MPI is not installed")
    program = [sys.executable, script(tmp_path, ADD_UP)]
    if wrapped:
        program = ["sh", "-c", f"{' '.join(program)}; true"]
    done = subprocess.run(
        [starter, *options, "-n", "3", *program],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PRTE_MCA_prte_silence_shared_fs": "1", "XDG_RUNTIME_DIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\d of 3: 111", done.stdout)) == [f"{r} of 3: 111" for r in range(3)]
    assert not list(tmp_path.glob("hostring-*/*")), "the file through which the ranks met is still there"


def test_torchrun_starts_the_same_program(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script(tmp_path, ADD_UP)],
        capture_output=True,
        text=True,
        timeout=110,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\d of 2: 11", done.stdout)) == ["0 of 2: 11", "1 of 2: 11"]
