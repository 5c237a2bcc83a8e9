"""Texts that end an answer. They are looked for across pieces, and no part of one is ever shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Pieces of text in, text that is safe to show out.

    Attributes:
        found: a stop text has come; what comes after it is not text of the answer.
        shown: characters that were given out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False
        self.shown = 0

    def push(self, piece: str) -> str:
        """What can be shown now: everything but a possible beginning of a stop text."""
        if self.found:
            return ""
        text = self._held + piece
        at = min((i for stop in self._stops if (i := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self.found, self._held = True, ""
            return self._give(text[:at])
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return self._give(text[: len(text) - keep])

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return "" if self.found else self._give(held)

    def _give(self, text: str) -> str:
        self.shown += len(text)
        return text


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`, which is not whole in it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
