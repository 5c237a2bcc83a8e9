"""Whether hostring can run here: its folders are in place, and the system has what it needs."""

from __future__ import annotations

import os
import sys

_SYSTEMS = ("linux", "darwin")


def check_links(folder: str = os.path.dirname(__file__)) -> None:
    """Raises: ImportError, when the checkout has text files in place of the links to top-level folders."""
    for name in ("transports", "integrations"):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            raise ImportError(
                f"{path} is a text file and should be a symbolic link to ../{name}: this checkout was made "
                f"without links; clone again with 'git clone -c core.symlinks=true', or install hostring with pip"
            )


def check_system() -> None:
    """Raises: RuntimeError, on systems that hostring does not run on."""
    if sys.platform not in _SYSTEMS:
        raise RuntimeError(f"hostring runs on Linux and macOS, and this is {sys.platform}; on Windows, use WSL 2")
