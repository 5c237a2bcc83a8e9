"""One generation over a group: all ranks step the model, the head rank decides every token and the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.model.cache import KVCache
from hostring.integrations.llm.model.sampling import (
    GO_ON,
    NOT_FINITE,
    STOP_EOS,
    STOP_LENGTH,
    Sampler,
    Sampling,
    local_candidates,
)
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.sharded import DTYPES, ShardedModel, build
from hostring.integrations.llm.stats import Stats, expected_bytes, measured

HEAD_RANK = 0
_PREFILL_CHUNK = 512  # positions; bounds the memory of activations and the scratch of the reduction


@dataclass
class Generation:
    """Ids and text of the answer, on every rank alike. `stop_reason` is "eos" or "length"."""

    tokens: list[int]
    text: str
    stop_reason: str
    stats: Stats


@dataclass
class Model:
    """A rank's part of a model with the tokenizer of the same checkpoint."""

    sharded: ShardedModel
    tokenizer: ChatTokenizer

    @property
    def comm(self) -> Comm:
        return self.sharded.comm

    def prompt_ids(self, text: str) -> list[int]:
        """Ids for a user's message: through the chat template where the checkpoint has one."""
        if self.tokenizer.template is None:
            return self.tokenizer.encode(text)
        return self.tokenizer.chat([{"role": "user", "content": text}])

    def generate(
        self,
        prompt: str | Sequence[int] | None,
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 128,
        on_text: Callable[[str], None] | None = None,
        on_token: Callable[[int], None] | None = None,
        cache: KVCache | None = None,
    ) -> Generation:
        """Complete a prompt. A collective: every rank calls it.

        Args:
            prompt: a user's message (see `prompt_ids`), or ids. The head rank's counts; others may pass None.
            sampling: how to choose, greedy when not given. The head rank's counts.
            max_tokens: the most to generate; fewer when the KV cache is full. The head rank's counts.
            on_text: called with pieces of text as they come, on the head rank only.
            on_token: called with every id as it comes, on every rank: what there is when a generation fails half-way.
            cache: an earlier turn's cache to continue from; a new one when not given. It holds all but the last token of
                that turn's answer, which therefore starts the next prompt.

        Raises:
            ValueError: an empty prompt, one that doesn't fit, or logits that are not numbers; on every rank.
            HostringError: the group failed.
        """
        started = perf_counter()
        ids = self.prompt_ids(prompt) if isinstance(prompt, str) else list(prompt or [])
        request = _share_request(self.comm, ids, sampling or Sampling(), max_tokens)
        cache = self.sharded.new_cache() if cache is None else cache
        request.fit(cache)
        return _Run(self, request, cache, on_text, on_token, started).generation()


def load_model(
    path: str | Path,
    comm: Comm,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    plan: ShardPlan | None = None,
    max_seq: int | None = None,
    replicate_embedding: bool = True,
    hash_activations: bool = False,
) -> Model:
    """Load this rank's part of the checkpoint at `path` (a GGUF file or a HF directory), and its tokenizer.

    Args:
        dtype: what this rank computes in: float32, float16 or bfloat16. Ranks may differ.
        device: what it computes on: "cpu", "cuda" (also ROCm), "cuda:1", "mps", "xpu", or "auto" for an accelerator
            if there is one (see `find_device`). Ranks may differ.
        plan: which part of the model each rank holds; balanced by default. Must be the same on all ranks.
        max_seq: positions of the KV cache; by default what the model was trained for, but at most 4096.
        replicate_embedding: every rank holds all embedding rows. Otherwise they are split too, at one more reduction per step.
        hash_activations: keep a running sha256 of the reduced hidden states.

    Raises:
        ValueError: there is no such dtype or device (no weights were read then), or what `sharded.build` says.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    sharded = build(
        open_checkpoint(path),
        comm,
        plan=plan,
        dtype=DTYPES[dtype],
        device=device,
        max_seq=max_seq,
        replicate_embedding=replicate_embedding,
        hash_activations=hash_activations,
    )
    return Model(sharded, load_tokenizer(path))


@dataclass(frozen=True)
class _Request:
    ids: list[int]
    sampling: Sampling
    max_tokens: int

    def fit(self, cache: KVCache) -> None:
        if not self.ids:
            raise ValueError("the prompt is empty; give at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; ask for at least 1")
        if cache.length + len(self.ids) > cache.max_seq:
            raise ValueError(
                f"the prompt's {len(self.ids)} tokens don't fit the KV cache of {cache.max_seq} positions, {cache.length} of them taken; "
                "raise max_seq or shorten the prompt"
            )


def _share_request(comm: Comm, ids: list[int], sampling: Sampling, max_tokens: int) -> _Request:
    """The head rank's request, on every rank: two collectives, so that no rank can run with other options."""
    whole = np.array([len(ids), max_tokens, sampling.top_k, sampling.seed], np.int64)
    real = np.array([sampling.temperature, sampling.top_p], np.float64)
    record = np.concatenate([whole.view(np.uint8), real.view(np.uint8)])
    comm.broadcast(record, root=HEAD_RANK)
    n_ids, max_tokens, top_k, seed = record[:32].view(np.int64).tolist()
    temperature, top_p = record[32:].view(np.float64).tolist()
    prompt = np.array(ids, np.int64) if comm.rank == HEAD_RANK else np.zeros(n_ids, np.int64)
    comm.broadcast(prompt, root=HEAD_RANK)
    return _Request(prompt.tolist(), Sampling(temperature, top_k, top_p, seed), max_tokens)


class _Run:
    """The state of one generation on one rank."""

    def __init__(
        self,
        model: Model,
        request: _Request,
        cache: KVCache,
        on_text: Callable[[str], None] | None,
        on_token: Callable[[int], None] | None,
        started: float,
    ) -> None:
        self.model, self.request, self.cache, self.started = model, request, cache, started
        self.sharded, self.comm = model.sharded, model.comm
        self.on_text = on_text if self.comm.rank == HEAD_RANK else None
        self.on_token = on_token
        self.sampler = Sampler(request.sampling)
        self.n_candidates = request.sampling.candidates(max(self.sharded.plan.vocab))
        self.limit = min(request.max_tokens, cache.max_seq - cache.length - len(request.ids) + 1)
        self.stream = model.tokenizer.stream()
        self.tokens: list[int] = []

    def generation(self) -> Generation:
        self.sharded.reducer.restart_hash()
        stats, begun = self._expected(), perf_counter()
        status = self._decide(self._prefill())
        now = perf_counter()
        stats.ttft_s, stats.prefill_tokens_per_s = now - self.started, stats.prompt_tokens / (now - begun)
        with measured(stats, self.comm):
            token = torch.zeros(1, 1, dtype=torch.long, device=self.sharded.device)
            while status == GO_ON:
                token.fill_(self.tokens[-1])
                status = self._decide(self.sharded.step(token, self.cache))
            stats.generated_tokens = len(self.tokens)
        if self.on_text is not None and (rest := self.stream.finish()):
            self.on_text(rest)
        stats.activation_sha256 = self.sharded.reducer.sha256
        reason = "eos" if status == STOP_EOS else "length"
        return Generation(self.tokens, self.model.tokenizer.decode(self.tokens), reason, stats)

    def _expected(self) -> Stats:
        reductions = self.sharded.reductions_per_step
        return Stats(
            prompt_tokens=len(self.request.ids),
            expected_collectives_per_token=reductions + 1,
            expected_bytes_per_token=expected_bytes(
                self.comm, self.sharded.config.hidden_size, reductions, 2 * self.n_candidates, HEAD_RANK
            ),
        )

    def _prefill(self) -> Tensor:
        ids = torch.tensor([self.request.ids], device=self.sharded.device)  # (1, prompt)
        for chunk in torch.split(ids, _PREFILL_CHUNK, 1):
            logits = self.sharded.step(chunk, self.cache)
        return logits

    def _decide(self, logits: Tensor) -> int:
        """One collective: candidates in, token and status out. logits: (1, local vocabulary)."""
        first = self.sharded.plan.vocab_of(self.comm.rank).start
        mine = local_candidates(logits[0], self.n_candidates, first)
        token, status = self.comm.decide(mine, self._choose, root=HEAD_RANK)[:, 0].tolist()
        if status == NOT_FINITE:
            raise ValueError(
                f"a logit is not a finite number after {len(self.tokens)} tokens; check the checkpoint, or compute in float32"
            )
        self.tokens.append(token)
        if self.on_token is not None:
            self.on_token(token)
        if self.on_text is not None and (piece := self.stream.push(token)):
            self.on_text(piece)
        return int(status)

    def _choose(self, stacked: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Runs on the head rank only."""
        answer = np.zeros(stacked.shape[1:], np.int32)
        token = self.sampler.choose(stacked)
        if token is None:
            answer[1, 0] = NOT_FINITE
        else:
            answer[0, 0] = token
            answer[1, 0] = STOP_EOS if token in self.model.tokenizer.eos_ids else GO_ON
            if answer[1, 0] == GO_ON and len(self.tokens) + 1 >= self.limit:
                answer[1, 0] = STOP_LENGTH
        return answer
