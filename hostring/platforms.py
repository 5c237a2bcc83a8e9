"""What hostring needs of its checkout, of the system and of the process."""

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


def prepare_process() -> None:
    """Before ranks start.

    Raises:
        RuntimeError: hostring does not run on this system.
    """
    if sys.platform not in _SYSTEMS:
        raise RuntimeError(f"hostring runs on Linux and macOS, and this is {sys.platform}; on Windows, use WSL 2")
    fill_standard_streams()


def fill_standard_streams() -> None:
    """Open /dev/null as every standard stream that is closed, as in daemons and under some supervisors.

    Otherwise the next descriptor takes its number: libuv ends the interpreter when it has to close such a one, and what
    a library or a child process writes to "stderr" would go into a link.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(opened, True)
