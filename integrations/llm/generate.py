"""One generation over a group: all ranks step the model, the head rank decides every token and the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.compute import Plan, build_local
from hostring.integrations.llm.generation import Generation, Parts, Run
from hostring.integrations.llm.model.cache import Cache
from hostring.integrations.llm.model.devices import find_device
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.sampling import Sampling
from hostring.integrations.llm.prefix import PrefixCache
from hostring.integrations.llm.request import Request, check_fit, share_request
from hostring.integrations.llm.same_bits import LogitsHash, OnLogits
from hostring.integrations.llm.sharded import DTYPES
from hostring.integrations.llm.speculation.speculator import Speculator, load_speculator
from hostring.integrations.llm.speculation.wish import Speculation

Prompt = str | Sequence[int] | Callable[[], str | Sequence[int]] | None


@dataclass
class Model:
    """A rank's part of a model with the tokenizer of the same checkpoint.

    Attributes:
        packed_ranks: which ranks compute packed.
        bytes_read: of tensor data, to load it. load_s: seconds that took, without the tokenizer.
        hash_logits: gather the logits of every step and hash them, see `Stats.logits_sha256`. on_logits: sees them
            then.
        speculator: guesses tokens, on the head rank, after `speculate`.
    """

    sharded: LocalModel
    tokenizer: ChatTokenizer
    packed_ranks: Sequence[bool] = ()
    bytes_read: int = 0
    load_s: float = 0.0
    hash_logits: bool = False
    on_logits: OnLogits | None = None
    speculator: Speculator | None = None

    @property
    def comm(self) -> Comm:
        return self.sharded.comm

    @cached_property
    def rows_without_token(self) -> Tensor | None:
        """Local rows of the head that stand for no token, which are never chosen. Files pad their vocabulary with
        them."""
        known, mine = self.tokenizer.known_ids(), self.sharded.plan.vocab_of(self.comm.rank)
        rows = [row for row, i in enumerate(mine) if i not in known]
        return torch.tensor(rows, device=self.sharded.forward.device) if rows else None

    def speculate(self, wish: Speculation) -> None:
        """Guess tokens from now on, and check them in steps of several rows. A collective; the head rank's wish counts.

        Raises:
            ValueError: the draft model can't be used; on every rank.
        """
        part = self.sharded
        clock, known = part.reducer.clock, self.tokenizer
        self.speculator = load_speculator(
            wish, self.comm, known, part.max_seq, lambda: clock.seconds, before=self.speculator
        )

    def prompt_ids(self, text: str) -> list[int]:
        """Ids for a user's message: through the chat template where the checkpoint has one."""
        if not self.tokenizer.templates.sources:
            return self.tokenizer.encode(text)
        return self.tokenizer.chat([{"role": "user", "content": text}])

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 128,
        on_text: Callable[[str], None] | None = None,
        on_token: Callable[[int], None] | None = None,
        cache: Cache | None = None,
        prefix: PrefixCache | None = None,
    ) -> Generation:
        """Complete a prompt. A collective: every rank calls it.

        Args:
            prompt: a user's message (see `prompt_ids`), or ids, or what returns one of these. The head rank's counts;
                others may pass None.
            sampling: how to choose, greedy when not given. The head rank's counts.
            max_tokens: the most to generate; fewer when the KV cache is full. The head rank's counts.
            on_text: called with pieces of text as they come, on the head rank only.
            on_token: called with every id as it comes, on every rank: what there is when a generation fails half-way.
            cache: an earlier turn's cache to continue from; a new one when not given. It holds all but the last token
                of that turn's answer, which therefore starts the next prompt.
            prefix: instead of a cache: what earlier prompts and answers left. What the prompt has in common with them
                from the start is not computed again. All ranks pass one, or none does.

        Raises:
            ValueError: an empty prompt, one that doesn't fit, an id outside the vocabulary, or logits that are not
                numbers; on every rank.
            TypeError: the prompt is neither text nor a list of ids; on every rank.
            HostringError: the group failed.
        """
        started = perf_counter()
        request = share_request(self.comm, lambda: self._request(prompt, sampling or Sampling(), max_tokens))
        if prefix is not None:
            check_fit(len(request.ids), prefix.cache.max_seq, 0)
            ids, cache = prefix.reuse(self.comm, request.ids), prefix.cache
        else:
            ids, cache = list(request.ids), self.sharded.new_cache() if cache is None else cache
            check_fit(len(ids), cache.max_seq, cache.length)
        logits = LogitsHash(self.comm, self.sharded.plan, self.on_logits) if self.hash_logits else None
        parts = Parts(self.sharded, self.tokenizer, self.rows_without_token, logits, self.speculator)
        found = Run(parts, request, ids, cache, on_text, on_token, started).generation()
        if prefix is not None:
            prefix.ids = [*request.ids, *found.tokens[:-1]]
        return found

    def _request(self, prompt: Prompt, sampling: Sampling, max_tokens: int) -> Request:
        """Runs on the head rank only."""
        if callable(prompt):
            prompt = prompt()
        ids = self.prompt_ids(prompt) if isinstance(prompt, str) else () if prompt is None else prompt
        guesses = 0 if self.speculator is None else self.speculator.most
        return Request.checked(ids, sampling, max_tokens, self.sharded.config.vocab_size, guesses)


def load_model(
    path: str | Path,
    comm: Comm,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    plan: Plan | None = None,
    max_seq: int | None = None,
    replicate_embedding: bool = True,
    hash_activations: bool = False,
    compile: bool | str = False,
    compute: str = "auto",
    packed_ranks: Sequence[bool] | None = None,
    same_bits: bool = False,
) -> Model:
    """Load this rank's part of the checkpoint at `path` (a GGUF file or a HF directory), and its tokenizer.

    Args:
        dtype: what this rank computes in: float32, float16 or bfloat16. Ranks may differ.
        device: what it computes on: "cpu", "cuda" (also ROCm), "cuda:1", "mps", "xpu", or "auto" for an accelerator
            if there is one (see `find_device`). Ranks may differ.
        plan: which part of the model each rank holds; balanced by default. Must be the same on all ranks. A `StagePlan`
            makes a pipeline, a `ContextPlan` shares KV caches by position, `Roles` let one rank compute prompts and
            another one decode, a `RowPlan` divides the rows of prompts.
        max_seq: positions of the KV cache; by default what the model was trained for, but at most 4096.
        replicate_embedding: every rank holds all embedding rows. Otherwise they are split too, at one more reduction
            per step.
        hash_activations: keep a running sha256 of the reduced hidden states, and check that they are used.
        compile: let torch compile the layers while the model is loaded; or the name of a backend of `torch.compile`.
            Ranks may differ; the others wait for this one in their first collective, up to its timeout.
        compute: "auto", "packed" or "exact", see `compute.build_local`. A packed rank has no use for `dtype`.
        packed_ranks: those of an earlier load in the same group, which then need not agree again.
        same_bits: promise the logits of any other number of ranks, bit for bit, and hash them; see docs/model.md.

    Raises:
        ValueError: there is no such dtype or device (no weights were read then), or what `sharded.build` says.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    begun = perf_counter()
    checkpoint = open_checkpoint(path)
    sharded, packed = build_local(
        checkpoint,
        comm,
        compute,
        find_device(device),
        plan=plan,
        max_seq=max_seq,
        hash_activations=hash_activations,
        dtype=DTYPES[dtype],
        replicate_embedding=replicate_embedding,
        compile=compile,
        packed_ranks=packed_ranks,
        same_bits=same_bits,
    )
    load_s = perf_counter() - begun
    return Model(sharded, load_tokenizer(path), packed, checkpoint.bytes_read, load_s, same_bits)
