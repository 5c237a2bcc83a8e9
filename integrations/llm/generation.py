"""One generation, step by step, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.model.cache import Cache
from hostring.integrations.llm.model.expected import Expected
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.sampling import (
    GO_ON,
    NOT_FINITE,
    STOP_EOS,
    STOP_LENGTH,
    Sampler,
    local_candidates,
)
from hostring.integrations.llm.request import HEAD_RANK, Request
from hostring.integrations.llm.same_bits import LogitsHash
from hostring.integrations.llm.speculation.decision import Decision, width
from hostring.integrations.llm.speculation.speculator import Speculator
from hostring.integrations.llm.stats import Stats, Traffic, decode_measured, expected_stats, prefill_measured

_PREFILL_CHUNK = 512  # positions in one forward pass; bounds the memory of activations and the scratch of the reduction


@dataclass
class Generation:
    """Ids and text of the answer, on every rank alike. `stop_reason` is "eos" or "length"."""

    tokens: list[int]
    text: str
    stop_reason: str
    stats: Stats


@dataclass
class Parts:
    """What a generation is computed with.

    Attributes:
        unknown: local rows of the head that stand for no token; None where there are none.
        logits: hashes them, where that is wanted.
        speculator: guesses, on the head rank, where the request wants them.
    """

    sharded: LocalModel
    tokenizer: ChatTokenizer
    unknown: Tensor | None
    logits: LogitsHash | None
    speculator: Speculator | None


class Run:
    """The state of one generation on one rank.

    Args:
        ids: of the prompt that are not in `cache`.
        started: when the call began, by `perf_counter`.
    """

    def __init__(
        self,
        parts: Parts,
        request: Request,
        ids: Sequence[int],
        cache: Cache,
        on_text: Callable[[str], None] | None,
        on_token: Callable[[int], None] | None,
        started: float,
    ) -> None:
        self.parts, self.request, self.ids, self.cache, self.started = parts, request, ids, cache, started
        self.sharded, self.comm, self.logits = parts.sharded, parts.sharded.comm, parts.logits
        self.on_text = on_text if self.comm.rank == HEAD_RANK else None
        self.on_token = on_token
        self.sampler = Sampler(request.sampling)
        self.n_candidates = request.sampling.candidates(max(self.sharded.plan.vocab))
        self.limit = min(request.max_tokens, cache.max_seq - cache.length - len(ids) + 1)
        self.stream = parts.tokenizer.stream()
        self.tokens: list[int] = []
        self.guesses: tuple[int, ...] = ()  # of the step that comes or runs
        self.rows: list[int] = []  # of each step after the prompt
        self.speculator = parts.speculator if request.guesses else None
        self.guesser = None if self.speculator is None else self.speculator.text(request.ids, self.n_candidates)

    def generation(self) -> Generation:
        audit, deciding = self.sharded.reducer.audit, self.sharded.deciding
        traffic = self._traffic()
        stats = expected_stats(traffic, len(self.request.ids), self._chunks())
        for counting in (audit, deciding):
            if counting is not None:
                counting.restart()
        if self.speculator is not None:
            self.speculator.pause()
        with prefill_measured(stats, self.sharded.counts, self.started):
            status = self._decide(self._prefill())
        with decode_measured(stats, self.sharded.counts, self.sharded.reducer.clock):
            while status == GO_ON:
                status = self._decide(self._step())
            stats.generated_tokens = len(self.tokens)
        stats.decode_steps = len(self.rows)
        if self.request.guesses and isinstance(traffic, Traffic):
            traffic.of_guesses(stats, self.rows, self._decided)
        if self.on_text is not None and (rest := self.stream.finish()):
            self.on_text(rest)
        if audit is not None:
            stats.activation_sha256, stats.wrong_steps = audit.sha256, audit.wrong_steps
        stats.handover = None if deciding is None else deciding.figures()
        stats.logits_sha256 = None if self.logits is None else self.logits.sha256
        reason = "eos" if status == STOP_EOS else "length"
        return Generation(self.tokens, self.parts.tokenizer.decode(self.tokens), reason, stats)

    def _chunks(self) -> list[int]:
        """Positions of each forward pass over the prompt."""
        whole, rest = divmod(len(self.ids), _PREFILL_CHUNK)
        return [_PREFILL_CHUNK] * whole + [rest] * (rest > 0)

    def _decided(self, n_rows: int) -> tuple[int, int]:
        """Numbers that each rank brings to the decision after a step of so many rows, and those of the decision."""
        return 2 * self.n_candidates * n_rows, width(self.request.guesses)

    def _traffic(self) -> Expected:
        if self.sharded.deciding is not None:
            return self.sharded.deciding.expected(self._decided(1))
        gathered = 0 if self.logits is None else self.logits.gathered_elements
        forward, reducing = self.sharded.forward, self.sharded.reducing
        elements, boundaries = forward.reduced_elements, forward.boundaries
        return Traffic(self.comm, reducing, elements, boundaries, self._decided(1), HEAD_RANK, gathered)

    def _prefill(self) -> Tensor:
        ids = torch.tensor([self.ids], device=self.sharded.forward.device)  # (1, prompt)
        for chunk in torch.split(ids, _PREFILL_CHUNK, 1):
            logits = self.sharded.step(chunk, self.cache)
        return logits

    def _step(self) -> Tensor:
        """Feed the last token, and the guesses after it. Returns logits, shape (1 + guesses, local vocabulary)."""
        fed = [self.tokens[-1], *self.guesses]
        self.rows.append(len(fed))
        if len(fed) == 1:
            return self.sharded.step(torch.tensor([fed], device=self.sharded.forward.device), self.cache)
        return self.sharded.step_rows([(self.cache, fed)], every=True)

    def _decide(self, logits: Tensor) -> int:
        """Candidates in, tokens and status out, by one collective or as the plan says. logits: (1 + guesses, local
        vocabulary)."""
        if self.logits is not None:
            self.logits.gather(logits)
        n_brought, n_decided = self._decided(len(logits))
        mine = np.zeros(n_brought, np.int32)
        first, size = self.sharded.plan.vocab_of(self.comm.rank).start, 2 * self.n_candidates
        for n, row in enumerate(self._known(logits)):
            mine[n * size : (n + 1) * size] = local_candidates(row, self.n_candidates, first).ravel()
        found = Decision.read(self.sharded.decide(mine, self._choose, HEAD_RANK, n_decided))
        self._take(found)
        if found.status == NOT_FINITE:
            raise ValueError(
                f"a logit is no finite number after {len(self.tokens)} tokens; check the checkpoint, or take float32"
            )
        return found.status

    def _take(self, found: Decision) -> None:
        """Keep what a step gave, and forget the guesses that were wrong."""
        if self.logits is not None:
            self.logits.add(len(found.tokens))
        self.cache.truncate(self.cache.length - (1 + len(self.guesses) - len(found.tokens)))
        self.guesses = found.guesses
        for token in found.tokens:
            self.tokens.append(token)
            if self.on_token is not None:
                self.on_token(token)
            if self.on_text is not None and (piece := self.stream.push(token)):
                self.on_text(piece)

    def _known(self, logits: Tensor) -> Tensor:
        """The logits, where rows without a token can't win."""
        unknown = self.parts.unknown
        return logits if unknown is None or not logits.numel() else logits.index_fill(1, unknown, -torch.inf)

    def _choose(self, stacked: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Runs on the rank that chooses: the head, unless the plan names another one."""
        status, tokens, size = GO_ON, list[int](), 2 * self.n_candidates
        for n, guess in enumerate((*self.guesses, None)):
            brought = stacked[:, n * size : (n + 1) * size].reshape(len(stacked), 2, -1)
            token = self.sampler.choose(brought)
            status = NOT_FINITE if token is None else self._status(token, len(self.tokens) + n + 1)
            if token is not None:
                tokens.append(token)
            if status != GO_ON or token != guess:
                break
        guesses = self._next(tokens) if status == GO_ON else ()
        answer = np.zeros(width(self.request.guesses), np.int32)
        Decision(status, tuple(tokens), guesses).write(answer)
        return answer

    def _status(self, token: int, count: int) -> int:
        """Whether the text goes on after this token, the `count`-th."""
        if token in self.parts.tokenizer.eos_ids:
            return STOP_EOS
        return STOP_LENGTH if count >= self.limit else GO_ON

    def _next(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Guesses for the next step, after these tokens."""
        if self.speculator is None or self.guesser is None:
            return ()
        self.speculator.noted(1, len(self.guesses), len(tokens), self.n_candidates)
        self.guesser.extend(tokens)
        left = self.limit - len(self.tokens) - len(tokens)
        return tuple(self.guesser.guesses(min(self.speculator.depth(1, self.n_candidates), left - 1)))
