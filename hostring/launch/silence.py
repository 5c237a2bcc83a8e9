"""Ranks that run a model notice one that stands still, also between machines."""

from __future__ import annotations

import os
from typing import Final

from hostring.group.heartbeat import NO_SIGN

DEFAULT_SILENCE_S: Final = 2.0
VARIABLE: Final = "HOSTRING_SILENCE"


def wanted_silence() -> float | None:
    """For `hostring.init` in programs that look by default: None leaves it to the environment, which says something."""
    return None if os.environ.get(VARIABLE, "").strip() else DEFAULT_SILENCE_S


def silence_environment() -> dict[str, str]:
    """The same for processes that this one starts."""
    return {} if wanted_silence() is None else {VARIABLE: f"{DEFAULT_SILENCE_S:g}"}


def is_silence(reason: str) -> bool:
    """Whether a rank is lost because it gave no sign of life, so that it may only be cut off."""
    return NO_SIGN in reason
