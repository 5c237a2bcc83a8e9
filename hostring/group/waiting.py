"""Tells a person who is waited for, while ranks start."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

log = logging.getLogger("hostring")

FIRST_LINE_S = 2.0  # of waiting, before the first line
MORE_LINES_S = 10.0  # between further lines


class Waiting:
    """One rank's waiting. It logs at WARNING level, so that a person sees it without having set up logging.

    Attributes:
        speaks: whether lines are logged. False on all ranks of a host but one, while all wait for the same.
    """

    def __init__(self, rank: int, deadline: float) -> None:
        self.speaks = True
        self.rank = rank
        self._start = time.monotonic()
        self._deadline = deadline
        self._due = self._start + FIRST_LINE_S

    def tell(self, what: str, state: str = "") -> None:
        """Logs a line if one is due. Call it often.

        Args:
            what: "for rank 1, 3".
            state: "2 of 4 here".
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + MORE_LINES_S
        if self.speaks:
            times = f"{now - self._start:.0f} s of {self._deadline - self._start:.0f} s"
            log.warning("hostring: rank %d waits %s (%s)", self.rank, what, f"{state}, {times}" if state else times)

    def next_phase(self) -> None:
        """From now on every rank waits for something of its own."""
        self.speaks = True
        self._due = max(self._due, time.monotonic() + FIRST_LINE_S)

    def until_due(self) -> float:
        """Seconds until the next line is due."""
        return max(0.0, self._due - time.monotonic())


def names(ranks: Iterable[int]) -> str:
    """ "rank 1, 3", with a long list shortened."""
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:16]))
    return f"rank {shown}" + (f" and {len(listed) - 16} more" if len(listed) > 16 else "")
