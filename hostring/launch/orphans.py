"""Ends a rank when its launcher is killed. Nobody else would, and the rank might wait for others for a long time."""

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
    """Have the kernel end this process by SIGTERM when the launcher that started it dies. Works on Linux only."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux" or str(os.getppid()) != launcher:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if str(os.getppid()) != launcher:  # it died meanwhile
        os.kill(os.getpid(), signal.SIGTERM)
