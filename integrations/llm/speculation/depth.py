"""How many guesses a step checks: as many as pay, by measured times and hits; none where they lose."""

from __future__ import annotations

from collections import deque

DEPTHS = (1, 3, 7, 14)  # guesses for each sequence; few, since packed ranks keep graphs for each number of rows
MAX_ROWS = 31  # of a step with guesses: from 32 on, packed ranks may multiply in another way (`wide.are_many`)
MAX_LOSS = 0.02  # of the time: what guesses that failed may have cost. Then there are none until that is true again.
MAX_TRIAL_LOSS = 0.01  # of the time: what trials may cost that are expected to lose
MAX_FIRST_LOSS = 0.5  # steps that the first trial may cost, before there is much time of which to take a share
MAX_CREDIT = 10.0  # steps that right guesses may have saved in a text: later ones may lose as much again, but no more
MAX_STEPS_BEFORE = 50.0  # of earlier texts, of whose time a text may lose its share
MAX_TIMES = 5  # of steps with as many rows, of which the lower median counts
MIN_PLAIN_STEPS = 3  # without guesses, before any: their time is what the others are compared with
_FIRST_HITS, _FIRST_TRIES = 2.0, 3.0  # before anything is known of hits
_MEMORY = 0.9  # what a step's hits still weigh after the next one
_FIRST_SHAPE = 1.0  # a step of a new number of rows takes longer once: so many times what a row takes to compute


class Depth:
    """Measures steps, and says how many guesses the next one gets.

    Args:
        most: guesses for a sequence in one step.
        always: don't measure: check as many guesses as there can be.
    """

    def __init__(self, most: int, always: bool = False) -> None:
        self._most, self._always = most, always
        self._depths = sorted({depth for depth in DEPTHS if depth < most} | {most} - {0})
        self._times: dict[int, deque[float]] = {}  # seconds of steps, by their rows
        self._computed = 0.0  # seconds that this rank computes for one row
        self._hits, self._tries = _FIRST_HITS, _FIRST_TRIES
        self._total = self._lost = 0.0

    def begin_text(self) -> None:
        """Another text begins. What guesses saved in those before may not be lost in it, and what they lost stays."""
        self._hits, self._tries = _FIRST_HITS, _FIRST_TRIES
        self._lost = max(0.0, self._lost)
        if self._times:
            self._total = min(self._total, MAX_STEPS_BEFORE * _middle(self._times[min(self._times)]))

    def choose(self, sequences: int = 1) -> int:
        """Guesses for each of so many sequences in the next step."""
        depths = [depth for depth in self._depths if sequences * (depth + 1) <= MAX_ROWS]
        if self._always or not depths:
            return depths[-1] if depths else 0
        plain = self._times.get(sequences)
        if plain is None or len(plain) < MIN_PLAIN_STEPS:
            return 0
        plain_s = _middle(plain)
        allowed = MAX_LOSS * self._total - self._lost + MAX_FIRST_LOSS * plain_s
        extra = {depth: self._step_s(sequences, depth) - plain_s for depth in self._tried(sequences, depths)}
        within = [depth for depth in extra if extra[depth] <= allowed]
        best = max(within, key=lambda depth: self._tokens(depth) / (plain_s + extra[depth]), default=0)
        if best and self._tokens(best) / (plain_s + extra[best]) > 1 / plain_s:
            return best
        least = depths[0]  # to learn whether that is still so
        return least if extra[least] <= allowed - (MAX_LOSS - MAX_TRIAL_LOSS) * self._total else 0

    def _tried(self, sequences: int, depths: list[int]) -> list[int]:
        """The depths whose steps were measured, and the next larger one: what a row costs is known from a few."""
        measured = [n for n, depth in enumerate(depths, 1) if sequences * (depth + 1) in self._times]
        return depths[: max(measured, default=0) + 1]

    def note(self, sequences: int, guesses: int, tokens: int, seconds: float, computed_s: float) -> None:
        """A step is done.

        Args:
            guesses: of all sequences together. tokens: that came of it.
            computed_s: of its time, what this rank computed.
        """
        self._total += seconds
        rows = sequences + guesses
        self._times.setdefault(rows, deque(maxlen=MAX_TIMES)).append(seconds)
        if not guesses:
            self._computed = computed_s / rows
            return
        hits = tokens - sequences
        self._hits = _MEMORY * self._hits + hits
        self._tries = _MEMORY * self._tries + min(guesses, tokens)
        plain = self._times.get(sequences)
        if plain:
            plain_s = _middle(plain)
            self._lost = max(-MAX_CREDIT * plain_s, self._lost + seconds - plain_s * tokens / sequences)

    def _tokens(self, depth: int) -> float:
        """Tokens that a sequence is expected to get from a step."""
        p = min(0.99, self._hits / self._tries)
        return float((1 - p ** (depth + 1)) / (1 - p))

    def _step_s(self, sequences: int, depth: int) -> float:
        """What a step takes; where none was measured, what steps of fewer rows say, or half of what computing its rows
        one after the other would add."""
        rows = sequences * (depth + 1)
        if rows in self._times:
            return _middle(self._times[rows])
        plain_s, of_row = _middle(self._times[sequences]), self._computed / 2
        fewer = max((known for known in self._times if sequences < known < rows), default=0)
        if fewer:
            of_row = max(0.0, _middle(self._times[fewer]) - plain_s) / (fewer - sequences)
        return plain_s + of_row * (rows - sequences) + _FIRST_SHAPE * self._computed


def _middle(values: deque[float]) -> float:
    """The lower median."""
    return sorted(values)[(len(values) - 1) // 2]
