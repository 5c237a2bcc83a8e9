"""The lists and numbers of a GGUF file that every kind of tokenizer is built from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from hostring.integrations.llm.checkpoint.fields import Fields

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file, in the order of their ids.

    Attributes:
        fields: of the file, below `tokenizer.ggml.`.
        tokens: their texts.
        kinds: NORMAL, CONTROL and so on, one per token.
        usual: ids of special tokens, where the file names none.
    """

    fields: Fields
    tokens: list[str]
    kinds: list[int]
    usual: Mapping[str, int]

    @staticmethod
    def of(fields: Fields, usual: Mapping[str, int]) -> Vocabulary:
        """Read it.

        Raises:
            ValueError: no list of texts, or a list of another length beside it.
        """
        tokens = texts_of(fields, "tokens")
        kinds = fields.get("token_type", [NORMAL] * len(tokens))
        _check_length(fields, "token_type", kinds, len(tokens))
        return Vocabulary(fields, tokens, kinds, usual)

    def scores(self) -> list[float]:
        """One per token.

        Raises:
            ValueError: the file has none.
        """
        found = self.fields.get("scores")
        _check_length(self.fields, "scores", found, len(self.tokens))
        return [float(score) for score in found]

    def of_kind(self, *kinds: int) -> list[str]:
        """The tokens of these kinds."""
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def id(self, name: str) -> int | None:
        """The token that `NAME_token_id` names.

        Raises:
            ValueError: there is no such token.
        """
        count = len(self.tokens)
        found = self.fields.get(f"{name}_token_id")
        if found is None:
            found = self.usual.get(name)
            return found if found is None or found < count else None
        if isinstance(found, bool) or not (isinstance(found, int) and 0 <= found < count):
            raise self.fields.wrong(f"{name}_token_id", f"the id of one of the {count} tokens")
        return found

    def text(self, name: str) -> str | None:
        """The same as `id`, as a text."""
        found = self.id(name)
        return None if found is None else self.tokens[found]

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Let the tokenizer find control tokens and the user's own in a text before it looks at anything else."""
        control, own = self.of_kind(CONTROL, UNKNOWN), self.of_kind(USER_DEFINED)
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])

    def surround(self, tokenizer: Tokenizer, first: str | None, last: str | None) -> None:
        """Let every text begin with the special token called `first`, and end with `last`, where there are such."""
        ids = {name: found for name in (first, last) if name is not None and (found := self.id(name)) is not None}
        if ids:
            template = [*(self.tokens[ids[n]] for n in (first,) if n in ids), "$A"]
            template += [self.tokens[ids[n]] for n in (last,) if n in ids]
            around = [(self.tokens[i], i) for i in dict.fromkeys(ids.values())]
            tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=around)


def texts_of(fields: Fields, name: str, hint: str = "a list of texts") -> list[str]:
    """A list of texts that the file must have."""
    found = fields.get(name)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise fields.wrong(name, hint)
    return found


def _check_length(fields: Fields, name: str, found: Any, length: int) -> None:
    if not isinstance(found, Collection) or len(found) < length:
        raise fields.wrong(name, f"a list of {length} numbers, one per token")
