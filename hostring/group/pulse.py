"""Signs of life of a process, through a store."""

from __future__ import annotations

import time

from hostring.store.stores import Store

BEAT_S = 0.1  # between two signs of life


class Pulse:
    """Signs of life of one process: a counter in the store, which it advances and others watch.

    Args:
        store: shared by all.
        key: of the counter.
        silent_s: without a sign of life for that long, a process counts as dead.
    """

    def __init__(self, store: Store, key: str, silent_s: float) -> None:
        self._store, self._key, self._silent_s = store, key, silent_s
        self._value = -1
        self._changed = time.monotonic()
        self._due = 0.0
        self._heard = False

    def beat(self) -> None:
        """A sign of life, if one is due. Call it often."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + BEAT_S
            self._store.add(self._key, 1)

    def silent(self) -> bool:
        """Whether this watcher has heard nothing for too long. Call it often."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + BEAT_S
            value = self._store.add(self._key, 0)
            if value != self._value:
                self._heard = self._value >= 0  # what was there before proves nothing
                self._value, self._changed = value, now
        return now - self._changed > self._silent_s

    def lives(self) -> bool:
        """Whether this watcher has heard a sign of life, and not too long ago."""
        return not self.silent() and self._heard
