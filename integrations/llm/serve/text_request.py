"""One text that a client asks for, as the scheduler sees it, and what happens to it on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hostring.integrations.llm.model.sampling import Sampling
from hostring.integrations.llm.serve.guides import Guide

STOP, LENGTH = "stop", "length"


@dataclass(frozen=True)
class TextRequest:
    """One sequence: ids to continue, how to choose, and when to end.

    Attributes:
        stop: texts that end it; they are not part of it.
        logit_bias: added to logits, by id.
        frequency_penalty, presence_penalty: subtracted for tokens that were generated before, as OpenAI defines them.
        top_logprobs: how many of the most likely tokens are reported beside each; None where no probability is wanted.
        prompt_logprobs: probabilities of the prompt's own tokens are wanted too.
        ignore_eos: go on after a token that ends a text.
        guide: which tokens may come.
    """

    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    guide: Guide | None = None

    @property
    def needs_all_logits(self) -> bool:
        """The choice depends on more than the best few logits of each rank."""
        changed = bool(self.logit_bias) or self.frequency_penalty != 0 or self.presence_penalty != 0
        changed = changed or self.guide is not None
        return changed or self.top_logprobs is not None or self.prompt_logprobs

    def candidates(self, largest_shard: int) -> int:
        """Logits that each rank brings for a choice."""
        return largest_shard if self.needs_all_logits else self.sampling.candidates(largest_shard)


@dataclass(frozen=True)
class TokenLogprob:
    """A token's logarithm of its probability, and the most likely ones at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Started:
    """The first positions are computed. `cached`: tokens of the prompt that were in a KV cache already."""

    cached: int


@dataclass(frozen=True)
class PromptLogprobs:
    """Of all tokens of the prompt but the first."""

    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Piece:
    """Text that can't change any more, and the probabilities of its tokens where they are wanted."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Ended:
    """There is no more text. `reason` is STOP or LENGTH; `generated`: tokens; `guessed`: those that were guessed on the
    way; `right`: guesses that came."""

    reason: str
    generated: int
    guessed: int = 0
    right: int = 0


@dataclass(frozen=True)
class Broken:
    """There is no more text, because something failed. `fault`: it is the server's, not the request's."""

    message: str
    fault: bool = True


Event = Started | PromptLogprobs | Piece | Ended | Broken
Deliver = Callable[[Event], None]
