"""A conversation: the model sees what was said before, and computes only what is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hostring.integrations.llm.generate import Model
from hostring.integrations.llm.generation import Generation
from hostring.integrations.llm.model.sampling import Sampling
from hostring.integrations.llm.prefix import PrefixCache


class Conversation:
    """Questions and answers in turn. Every rank holds one; the head rank's remembers what was said.

    A model without a chat template continues a text: each prompt is then a new line of it.

    Attributes:
        messages: what was said, as chat templates want it.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.messages: list[dict[str, str]] = []
        self._text: list[int] = []  # of a model that continues it
        self._prefix = PrefixCache(model.sharded.new_cache())

    def restart(self) -> None:
        """Forget what was said. What the next prompt has in common with it stays in the cache."""
        self.messages, self._text = [], []

    def forget_cache(self) -> None:
        """Remember what was said, but compute it again: for after a failure of the group."""
        self._prefix.forget()

    def ids(self, prompt: str) -> list[int]:
        """Ids of everything said so far and of this prompt.

        Raises:
            ValueError: the prompt can't be encoded, or the template refuses it.
        """
        tokenizer = self.model.tokenizer
        if tokenizer.templates.sources:
            return tokenizer.chat([*self.messages, {"role": "user", "content": prompt}])
        if not self._text:
            return tokenizer.encode(prompt)
        return [*self._text, *tokenizer.encode_bare(f"\n{prompt}")]

    def answer(
        self,
        ids: Sequence[int] | Callable[[], Sequence[int]] | None,
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 128,
        on_text: Callable[[str], None] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Generate after `ids`, which the head rank has from `ids`. A collective; see `Model.generate`."""
        return self.model.generate(
            ids, sampling, max_tokens=max_tokens, on_text=on_text, on_token=on_token, prefix=self._prefix
        )

    def remember(self, prompt: str, ids: Sequence[int], answer: Generation) -> None:
        """What was asked and answered is part of the conversation from now on."""
        self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.text}]
        self._text = [*ids, *(answer.tokens[:-1] if answer.stop_reason == "eos" else answer.tokens)]

    def ask(self, prompt: str | None, sampling: Sampling | None = None, *, max_tokens: int = 128) -> Generation:
        """Ask and remember. A collective: every rank calls it; the head rank's prompt counts, others may pass None."""
        asked: list[int] = []

        def make() -> list[int]:
            asked.extend(self.ids(str(prompt)))
            return asked

        found = self.answer(None if prompt is None else make, sampling, max_tokens=max_tokens)
        if asked:
            self.remember(str(prompt), asked, found)
        return found
