"""A program for ranks that somebody starts."""

from __future__ import annotations

from pathlib import Path

ADD_UP = """
import sys
import numpy as np
import hostring
with hostring.init(timeout=30) as comm:
    x = np.array([10.0 ** comm.rank], np.float32)
    comm.all_reduce(x)
    print(f"{comm.rank} of {comm.world_size}: {x[0]:.0f} {' '.join(sys.argv[1:])}")
"""


def script(folder: Path, text: str) -> str:
    path = folder / "ranks.py"
    path.write_text(text, encoding="utf-8")
    return str(path)
