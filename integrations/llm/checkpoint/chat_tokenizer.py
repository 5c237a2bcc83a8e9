"""Text to token ids and back, and conversations to ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from hostring.integrations.llm.checkpoint.chat_template import DEFAULT, ChatTemplates


class ChatTokenizer:
    """A tokenizer with its stop tokens and chat templates.

    Args:
        tokenizer: the `tokenizers.Tokenizer` underneath.
        eos_ids: any of these ends a generation.
        templates: jinja chat templates by name; empty when the checkpoint has none.
        specials: special tokens that templates may name, such as `eos_token`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        templates: Mapping[str, str] | str | None = None,
        specials: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        sources = {DEFAULT: templates} if isinstance(templates, str) else templates or {}
        self.templates = ChatTemplates(sources, specials or {})

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def template(self) -> str | None:
        """The chat template that is used when none is named; None when there is none."""
        return self.templates.sources.get(DEFAULT)

    def known_ids(self) -> frozenset[int]:
        """The ids that stand for a token. A model may have more rows than that."""
        return frozenset(self.tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, among the tokens that the checkpoint puts around it (such as a BOS).

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        check_text(text)
        return list(self.tokenizer.encode(text).ids)

    def encode_bare(self, text: str) -> list[int]:
        """Ids of text in the middle of a sequence, without tokens that stand at its start or end."""
        check_text(text)
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Ids of a conversation, ready for the model's answer.

        Args:
            messages: dicts with "role" (system, user, assistant) and "content".
            variables: see `ChatTemplates.render`.

        Raises:
            ValueError: the checkpoint has no chat template, or the template refuses the messages.
        """
        return self.encode_bare(self.templates.render(messages, **variables))

    def stream(self) -> TextStream:
        """A decoder for tokens that come one at a time."""
        return TextStream(self)


class TextStream:
    """Tokens in, pieces of text out. A piece never ends inside a character; the pieces joined are the whole text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._unfinished: list[int] = []  # since the last piece
        self._emitted = ""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._ids.append(token)
        self._unfinished.append(token)
        try:
            piece = self._step(token)
        except Exception:  # the library raises Exception itself, when bytes after whole characters spell none
            self._stream = DecodeStream(skip_special_tokens=True)
            piece = "".join([self._step(again) for again in self._unfinished])
        if piece:
            self._unfinished.clear()
            self._emitted += piece
        return piece

    def _step(self, token: int) -> str:
        return self._stream.step(self._tokenizer.tokenizer, token) or ""

    def finish(self) -> str:
        """What is left when no more tokens come: an unfinished character shows as U+FFFD."""
        whole = self._tokenizer.decode(self._ids)
        return whole[len(self._emitted) :] if whole.startswith(self._emitted) else ""


def check_text(text: str) -> None:
    """Raise an error unless this is text that can be encoded.

    Raises:
        TypeError: it is no string.
        ValueError: it holds half of a surrogate pair, as `\\ud83d`, which stands for no character.
    """
    if not isinstance(text, str):
        raise TypeError(f"the text is a {type(text).__name__}; give a str")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(
            f"the text holds U+{ord(text[exc.start]):04X} at position {exc.start}, half of a surrogate pair, "
            f"which is no "
            "character; decode the bytes it came from as UTF-8"
        ) from None
