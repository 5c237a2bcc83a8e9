"""Answers that follow a grammar: which tokens may come next, by llguidance."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer


class Guide:
    """Where one text stands in its grammar. Each text has one of its own."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def another(self) -> Guide:
        """For another text of the same grammar, at the same place."""
        return Guide(self._matcher.deep_copy())

    def allowed(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which of `ids` may come next; those below 0 may not."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little").view(np.bool_)
        known = (ids >= 0) & (ids < len(bits))
        return known & bits[np.where(known, ids, 0)]

    def accept(self, token: int) -> bool:
        """This token has come. Returns whether more may come."""
        self._matcher.consume_token(token)
        return not self._matcher.is_stopped()


class Guides:
    """Makes guides for one tokenizer. The first takes a second or more."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._known: Any = None

    def of(self, grammar: str) -> Guide:
        """A guide at the start of `grammar`, which is in llguidance's form.

        Raises:
            ValueError: the grammar is wrong, or asks for what llguidance doesn't have.
        """
        from llguidance import LLMatcher, LLTokenizer

        with self._lock:
            if self._known is None:
                source, eos_ids = self._tokenizer.tokenizer.to_str(), sorted(self._tokenizer.eos_ids)
                self._known = LLTokenizer(source, eos_token=eos_ids or None)
        matcher = LLMatcher(self._known, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return Guide(matcher)


def schema_grammar(schema: dict[str, Any]) -> str:
    """The grammar of the JSON texts that a JSON schema allows."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(with_spaces(schema)))


def with_spaces(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` for JSON with one space after commas and colons, and none elsewhere: small models write spaces without
    end."""
    return {**schema, "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
