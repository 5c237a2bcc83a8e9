"""Counts of tokens, as clients are told them."""

from __future__ import annotations

from typing import Any

from hostring.integrations.llm.serve.text_request import Ended, Event, Started


class Usage:
    """Counts over the texts of one HTTP request. Texts of one prompt count it once.

    Args:
        prompts: tokens of each prompt. n: texts per prompt.
    """

    def __init__(self, prompts: list[int], n: int) -> None:
        self._prompt_tokens, self._n = sum(prompts), n
        self._cached: dict[int, int] = {}  # of the first text of each prompt
        self._generated = self._guessed = self._right = 0

    def note(self, index: int, event: Event) -> None:
        """Something has happened to the text with this number."""
        if isinstance(event, Started) and index % self._n == 0:
            self._cached[index] = event.cached
        elif isinstance(event, Ended):
            self._generated += event.generated
            self._guessed += event.guessed
            self._right += event.right

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._generated,
            "total_tokens": self._prompt_tokens + self._generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        if self._guessed:
            wrong = self._guessed - self._right
            counts = {"accepted_prediction_tokens": self._right, "rejected_prediction_tokens": wrong}
            found["completion_tokens_details"] = counts
        return found
