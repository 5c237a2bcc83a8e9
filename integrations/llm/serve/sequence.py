"""One text under way, at the head rank: what it has, what it wants next, and when it is complete."""

from __future__ import annotations

from collections.abc import Iterable

from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.serve.choosing import Chooser, Logits
from hostring.integrations.llm.serve.stops import StopScanner
from hostring.integrations.llm.serve.text_request import (
    LENGTH,
    STOP,
    Broken,
    Deliver,
    Ended,
    Piece,
    PromptLogprobs,
    Started,
    TextRequest,
    TokenLogprob,
)


class Sequence:
    """One text under way.

    Attributes:
        deliver: called with each event, on the thread of the steps.
        cancelled: nobody wants it any more. Any thread may set it.
        slot: of its KV cache, once it has one. cached: positions that were in there.
        tokens: generated so far.
        prompt: what is fed before the next choice: the ids of the request, and after a restart the tokens so far.
        fed: tokens of the prompt that are computed, the cached ones included.
        n_candidates: logits that each rank brings for a choice.
        guesses: tokens that the step under way checks. guessed, right: how many there were so far, and how many of them
            came.
        awaited: a step is under way whose logits say how it goes on.
        turn: when it was last part of a step, as a count.
    """

    def __init__(self, request: TextRequest, tokenizer: ChatTokenizer, deliver: Deliver) -> None:
        self.request, self.deliver = request, deliver
        self.cancelled = False
        self.slot = -1
        self.cached = self.fed = self.turn = 0
        self.n_candidates = 1
        self.guesses: tuple[int, ...] = ()
        self.guessed = self.right = 0
        self.awaited = False
        self.tokens: list[int] = []
        self.prompt, self._restarted = request.ids, False
        self._eos_ids = frozenset() if request.ignore_eos else tokenizer.eos_ids
        self._chooser = Chooser(request)
        self._stream, self._stops = tokenizer.stream(), StopScanner(request.stop)
        self._pending: list[tuple[int, TokenLogprob]] = []  # with the character at which the token begins
        self._characters = 0
        self._prompt_logprobs: list[TokenLogprob] = []

    @property
    def prompt_left(self) -> int:
        """Tokens of the prompt that are not computed yet."""
        return len(self.prompt) - self.fed

    @property
    def scores_prompt(self) -> bool:
        """The logits after each position of the prompt are wanted."""
        return self.request.prompt_logprobs and not self.tokens

    @property
    def ids(self) -> list[int]:
        """All ids whose positions are computed. The last token has not been fed yet."""
        generated = len(self.request.ids) + len(self.tokens) - len(self.prompt)  # since the last restart
        return [*self.prompt[: self.fed], *(self.tokens[-generated:-1] if generated else ())]

    @property
    def length(self) -> int:
        """How many that are."""
        return self.fed + max(0, len(self.request.ids) + len(self.tokens) - len(self.prompt) - 1)

    def start(self, slot: int, cached: int) -> None:
        """It has a slot, whose cache holds its first `cached` tokens."""
        self.slot, self.cached, self.fed = slot, cached, cached
        if not self._restarted:
            self.deliver(Started(cached))

    def restart(self) -> None:
        """All KV caches are lost: what it has is fed again, and it goes on where it was."""
        self.prompt, self._restarted, self.awaited = (*self.request.ids, *self.tokens), self.slot >= 0, False
        self.guesses = ()
        if not self.tokens:
            self._prompt_logprobs.clear()

    def accept_all(self, logits: Iterable[Logits]) -> bool:
        """Take the logits after each token of a step, while its guesses are right. Returns whether more is wanted."""
        guesses, self.guesses = self.guesses, ()
        self.guessed += len(guesses)
        for n, one in enumerate(logits):
            self.right += n > 0
            if not self.accept(one):
                return False
            if self.tokens[-1:] != list(guesses[n : n + 1]) or n == len(guesses):
                break
        return True

    def accept(self, logits: Logits) -> bool:
        """Take the logits after the last position that was fed. Returns whether more is wanted."""
        if self.scores_prompt and self.fed < len(self.request.ids):
            self._prompt_logprobs.append(self._chooser.logprob(logits, self.request.ids[self.fed]))
            return True
        if self.scores_prompt:
            self.deliver(PromptLogprobs(tuple(self._prompt_logprobs)))
            if self.request.max_tokens == 0:
                return self._end(LENGTH)
        token = self._chooser.choose(logits)
        if token is None:
            where = f"after {len(self.tokens)} tokens"
            self.deliver(Broken(f"a logit is not a finite number {where}; check the checkpoint, or compute in float32"))
            return False
        self.tokens.append(token)
        if token in self._eos_ids:
            return self._end(STOP)
        if self.request.top_logprobs is not None:
            self._pending.append((self._characters, self._chooser.logprob(logits, token)))
        goes_on = self.request.guide is None or self.request.guide.accept(token)
        self._show(self._stream.push(token))
        if self._stops.found or not goes_on:
            return self._end(STOP)
        return True if len(self.tokens) < self.request.max_tokens else self._end(LENGTH)

    def _show(self, piece: str) -> None:
        self._characters += len(piece)
        self._give(self._stops.push(piece))

    def _give(self, text: str) -> None:
        if text:
            shown = [logprob for start, logprob in self._pending if start < self._stops.shown]
            self._pending = [(start, logprob) for start, logprob in self._pending if start >= self._stops.shown]
            self.deliver(Piece(text, tuple(shown)))

    def _end(self, reason: str) -> bool:
        """Give out what was held back, and say that this is all."""
        if not self._stops.found:
            self._show(self._stream.finish())
            self._give(self._stops.finish())
            if self._pending:  # of tokens that stand for no text
                self.deliver(Piece("", tuple(logprob for _, logprob in self._pending)))
        why = STOP if self._stops.found else reason
        self.deliver(Ended(why, len(self.tokens), self.guessed, self.right))
        return False
