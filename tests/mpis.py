"""Where the MPIs are that tests start ranks with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MPI_HOME = Path(os.environ.get("PEERS_HOME", "~/.cache/hostring-peers")).expanduser()


def mpi(folder: str, name: str) -> str | None:
    """The path of a program of an MPI, or None where it isn't installed."""
    path = MPI_HOME / folder / "bin" / name
    return str(path) if path.exists() else shutil.which(name)
