"""How much of a prompt one step computes: as much as the texts under way can wait for."""

from __future__ import annotations

from collections.abc import Sequence

from hostring.integrations.llm.serve.steps import FROM_PROMPT, Row

MAX_CHUNK = 512  # positions in one forward pass; bounds the memory of activations
MIN_CHUNK = 16  # below that, a prompt would never get anywhere
_WEIGHT_OF_NEWEST = 0.3


class PrefillPace:
    """Measures what a position of a prompt costs, and says how many fit into a step.

    Args:
        limit_s: what a step may take while texts are written.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._decode_s = 0.0  # of one row
        self._prefill_s = 0.0  # of one position of a prompt

    def note(self, rows: Sequence[Row], seconds: float) -> None:
        """A step with these rows took so long."""
        read = sum(row.positions for row in rows if row.token == FROM_PROMPT)
        written = sum(row.token != FROM_PROMPT for row in rows)
        if not read:
            self._decode_s = _mean(self._decode_s, seconds / written)
        elif read >= MIN_CHUNK:
            self._prefill_s = _mean(self._prefill_s, max(0.0, seconds - self._decode_s * written) / read)

    def budget(self, writing: int) -> int:
        """Positions of prompts in the next step, beside so many texts that are written. Always a power of two, so that
        few shapes of steps come up."""
        if not writing:
            return MAX_CHUNK
        if not self._prefill_s:
            return MIN_CHUNK
        left = (self._limit_s - self._decode_s * writing) / self._prefill_s
        chunk = MIN_CHUNK
        while 2 * chunk <= min(left, MAX_CHUNK):
            chunk *= 2
        return chunk


def _mean(before: float, newest: float) -> float:
    return newest if not before else before + _WEIGHT_OF_NEWEST * (newest - before)
