"""Guesses from the text itself: what followed the last few tokens when they stood there before."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NGRAM = 4  # tokens that are looked for first; fewer of them if those were not there before
MIN_NGRAM = 2  # a single token is followed by too many things


class PromptLookup:
    """One text, and where each short run of its tokens last stood.

    Source: prompt lookup decoding (A. Saxena, 2023), as in transformers' `prompt_lookup_num_tokens`.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # the position after the latest run of these ids

    def begin(self, ids: Sequence[int]) -> None:
        """Another text, which begins with these ids."""
        self._ids, self._after = [], {}
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """The text goes on with these ids."""
        known = self._ids
        for token in ids:
            at = len(known)
            for n in range(MIN_NGRAM, min(MAX_NGRAM, at) + 1):
                self._after[tuple(known[at - n :])] = at
            known.append(token)

    def guesses(self, count: int) -> list[int]:
        """So many ids that may come next; none where the last ids are new. Beyond the end of the text, the part since
        the earlier run is repeated."""
        known = self._ids
        for n in range(min(MAX_NGRAM, len(known)), MIN_NGRAM - 1, -1):
            start = self._after.get(tuple(known[-n:]))
            if start is not None:
                period = len(known) - start
                return [known[start + i % period] for i in range(count)]
        return []
