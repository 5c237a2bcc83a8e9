"""How a child process ended: for the shell, and in words."""

from __future__ import annotations

import contextlib
import signal


def exit_code(returncode: int) -> int:
    """What a shell reports for a child with this `returncode` of `subprocess`: 128 + n for one killed by signal n."""
    return 128 - returncode if returncode < 0 else returncode


def how_it_ended(returncode: int) -> str:
    """In words: "exited with code 7", "was killed by SIGKILL"."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"
