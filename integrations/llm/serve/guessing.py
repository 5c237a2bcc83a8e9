"""Guesses for the texts that are written, at the head rank: how many a step has, and what came of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hostring.integrations.llm.serve.sequence import Sequence
from hostring.integrations.llm.serve.steps import FROM_PROMPT, Row
from hostring.integrations.llm.speculation.speculator import Guesser, Speculator


@dataclass
class GuessTotals:
    """Counts since the start.

    Attributes:
        guessed: tokens that were guessed; right: those that came. steps: rows of texts that were written.
    """

    guessed: int = 0
    right: int = 0
    steps: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a text got from each of its steps."""
        return 1.0 + self.right / self.steps if self.steps else 1.0


class Guessing:
    """Guesses for several texts.

    Args:
        speculator: None where nothing is guessed.
        max_seq: positions of each KV cache.
    """

    def __init__(self, speculator: Speculator | None, max_seq: int) -> None:
        self.totals = GuessTotals()
        self._speculator, self._max_seq = speculator, max_seq
        self._guessers: dict[Sequence, Guesser] = {}

    def note(self, rows: Collection[Row], sequences: Iterable[Sequence], right: int) -> None:
        """A step is done with these rows of these texts, and another one is going to be decided. `right`: guesses that
        came."""
        written = [row for row in rows if row.token != FROM_PROMPT]
        guessed = sum(len(row.guesses) for row in written)
        self.totals.guessed += guessed
        self.totals.right += right
        self.totals.steps += len(written)
        if self._speculator is None:
            return
        if len(written) < len(rows) or not rows:
            self._speculator.pause()
        self._speculator.noted(len(written), guessed, len(written) + right, _most_candidates(sequences))

    def row(self, sequence: Sequence, depth: int) -> Row:
        """What a text feeds that is written: its last token, and at most so many guesses."""
        left = min(sequence.request.max_tokens - len(sequence.tokens), self._max_seq - sequence.length)
        guesses = tuple(self._guesses(sequence, min(depth, left - 1)))
        sequence.guesses = guesses
        return Row(sequence.slot, 1 + len(guesses), sequence.tokens[-1], sequence.length, guesses)

    def _guesses(self, sequence: Sequence, count: int) -> list[int]:
        if self._speculator is None or count < 1:
            return []
        text = [*sequence.request.ids, *sequence.tokens]
        guesser = self._guessers.get(sequence)
        if guesser is None:
            guesser = self._guessers[sequence] = self._speculator.text(text, sequence.n_candidates)
        guesser.extend(text[guesser.length :])
        return guesser.guesses(count)

    def depth(self, texts: Collection[Sequence], beside_prompts: bool) -> int:
        """Guesses for each of these texts in the next step; none where it also reads prompts."""
        if self._speculator is None or not texts or beside_prompts:
            return 0
        return self._speculator.depth(len(texts), _most_candidates(texts))

    def forget(self, sequence: Sequence) -> None:
        """This text has ended."""
        self._guessers.pop(sequence, None)


def _most_candidates(texts: Iterable[Sequence]) -> int:
    return max((text.n_candidates for text in texts), default=1)
