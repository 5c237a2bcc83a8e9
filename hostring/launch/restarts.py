"""Which ranks of a launch are started again when they fail."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

log = logging.getLogger("hostring")


class Revival(Protocol):
    """Decides which ranks are started again. Both methods are called often, from the thread that called `launch`."""

    def again(self, rank: int, how: str) -> bool:
        """Whether to start `rank` again after it failed; otherwise all ranks are ended. `how` it ended, in words."""

    def stuck(self) -> Collection[int]:
        """Ranks to kill because they do nothing any more."""


class Rejoining:
    """Starts ranks again, `limit` times in all, but never rank 0."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def again(self, rank: int, how: str) -> bool:
        """See `Revival`."""
        if rank == 0 or self._left < 1:
            return False
        self._left -= 1
        log.warning("hostring: rank %d %s; it is started again, %d more times at most", rank, how, self._left)
        return True

    def stuck(self) -> Collection[int]:
        """See `Revival`."""
        return ()
