"""What the head rank decides after a step of one text, as the numbers that every rank gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BITS = 8  # of each of the counts in the first number


@dataclass(frozen=True)
class Decision:
    """What a step gave.

    Attributes:
        status: whether the text goes on, see `sampling`.
        tokens: those that were chosen.
        guesses: what the next step feeds after the last of them, to be checked.
    """

    status: int
    tokens: tuple[int, ...]
    guesses: tuple[int, ...] = ()

    def write(self, into: npt.NDArray[np.int32]) -> None:
        """Put it at the start of `into`, which is flat."""
        counts = len(self.tokens) << _BITS | len(self.guesses) << 2 * _BITS
        numbers = [self.status | counts, *self.tokens, *self.guesses]
        into[: len(numbers)] = numbers

    @staticmethod
    def read(numbers: npt.NDArray[np.int32]) -> Decision:
        first, mask = int(numbers[0]), (1 << _BITS) - 1
        n_tokens, n_guesses = first >> _BITS & mask, first >> 2 * _BITS & mask
        ids = tuple(numbers[1 : 1 + n_tokens + n_guesses].tolist())
        return Decision(first & mask, ids[:n_tokens], ids[n_tokens:])


def width(most: int) -> int:
    """Numbers that any decision fits in, where a step has up to so many guesses."""
    return 2 * (1 + most)
