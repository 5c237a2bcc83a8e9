"""How much of a prompt one step computes: as much as the texts under way can wait for."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic

from hostring.integrations.llm.serve.steps import FROM_PROMPT, Row

# Positions in one forward pass. Below the first, a prompt would never get anywhere; the last bounds the memory of
# activations. Few, since packed ranks keep graphs for each number of rows.
CHUNKS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MIN_CHUNK, MAX_CHUNK = CHUNKS[0], CHUNKS[-1]
MAX_TRIAL = 1.7  # a size that was not measured may take so many times the limit, once
_STRETCH = 256  # positions of a prompt between which a chunk costs about the same: later ones attend to more
_VALID_S = 300.0  # how long a measured time is believed
_WEIGHT_OF_NEWEST = 0.3


class PrefillPace:
    """Measures what a chunk of each size takes, and says which one fits into a step.

    A chunk has a time of its own for each size: large ones may be computed in another way, whose cost is mostly the
    same for any number of positions.

    Args:
        limit_s: what a step may take while texts are written.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._decode_s = 0.0  # of one row
        self._times: dict[int, dict[int, tuple[float, float]]] = {}  # by size and stretch: seconds, and when measured

    def note(self, rows: Sequence[Row], seconds: float, start: int) -> None:
        """A step with these rows took so long. start: position of the first of them that is of a prompt."""
        read = sum(row.positions for row in rows if row.token == FROM_PROMPT)
        written = sum(row.token != FROM_PROMPT for row in rows)
        if not read:
            newest = seconds / written
            self._decode_s += (_WEIGHT_OF_NEWEST if self._decode_s else 1.0) * (newest - self._decode_s)
        elif read in CHUNKS:
            alone = max(0.0, seconds - self._decode_s * written)
            self._times.setdefault(read, {})[start // _STRETCH] = alone, monotonic()

    def budget(self, writing: int, start: int) -> int:
        """Positions of prompts in the next step, from `start` on, beside so many texts that are written."""
        if not writing:
            return MAX_CHUNK
        left = self._limit_s - self._decode_s * writing
        known = self._known(start // _STRETCH)
        expected = {chunk: _expected(chunk, known) for chunk in CHUNKS}
        untried = [chunk for chunk in CHUNKS if chunk not in known and expected[chunk] <= left * MAX_TRIAL]
        fitting = [chunk for chunk in CHUNKS if expected[chunk] <= left]
        return max(fitting + untried[:1], default=MIN_CHUNK)

    def _known(self, stretch: int) -> dict[int, float]:
        """Seconds of the sizes that were measured lately, at the stretch that is nearest."""
        since, known = monotonic() - _VALID_S, dict[int, float]()
        for size, times in self._times.items():
            valid = {at: seconds for at, (seconds, when) in times.items() if when >= since}
            if valid:
                known[size] = valid[min(valid, key=lambda at: abs(at - stretch))]
        return known


def _expected(chunk: int, known: dict[int, float]) -> float:
    """Seconds of a chunk: at most what smaller ones take that read as much, or what a larger one takes. Between two
    sizes that are known, on the line through them."""
    below = max((size for size in known if size < chunk), default=None)
    above = min((size for size in known if size > chunk), default=None)
    longest = inf if below is None else known[below] * chunk / below
    if chunk in known:
        return min(known[chunk], longest)
    if above is None:
        return longest
    if below is None:
        return known[above]
    return min(longest, known[below] + (known[above] - known[below]) * (chunk - below) / (above - below))
