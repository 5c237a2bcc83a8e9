"""A rank whose launcher was killed has nobody left who would end it, and may wait for others as long as its deadlines are."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

LAUNCHER: Final = "HOSTRING_LAUNCHER"
"""The variable with the process id of the launcher."""

_PR_SET_PDEATHSIG: Final = 1


def end_with_launcher() -> None:
    """Have the kernel end this process by SIGTERM when `hostring launch` dies that started it. Linux alone can; elsewhere nothing."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux" or str(os.getppid()) != launcher:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if str(os.getppid()) != launcher:  # it died meanwhile
        os.kill(os.getpid(), signal.SIGTERM)
