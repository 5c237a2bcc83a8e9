"""Ranks that run a model notice one that stands still, also between machines."""

from __future__ import annotations

import os
from typing import Final

from hostring.group.heartbeat import NO_SIGN

DEFAULT_SILENCE_S: Final = "2"


def watch_by_default() -> None:
    """Let groups of this process, and of those that it starts, notice silent ranks, unless HOSTRING_SILENCE is set."""
    os.environ.setdefault("HOSTRING_SILENCE", DEFAULT_SILENCE_S)


def is_silence(reason: str) -> bool:
    """Whether a rank is lost because it gave no sign of life, so that it may only be cut off."""
    return NO_SIGN in reason
