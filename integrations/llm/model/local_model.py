"""What one rank runs, whichever way it computes: its part of a model, in a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.model.cache import check_fit
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer

Rows = Sequence[tuple[Any, Sequence[int]]]


class Forward(Protocol):
    """How a rank computes: `ExactForward` with dequantised weights, `PackedForward` with the file's own blocks.

    Attributes:
        compute: "exact" or "packed".
        dtype: of what this rank computes in; packed, of what enters the reductions. device: where it computes.
        compiled: torch has compiled the layers.
        decoder: the local weights.
    """

    compute: str
    dtype: torch.dtype
    device: torch.device
    compiled: bool
    decoder: Any

    @property
    def nbytes_held(self) -> int:
        """Bytes of weights that this rank holds, mapped or copied."""

    @property
    def reduced_elements(self) -> list[int]:
        """Elements of each reduction of one row's step, in order."""

    def new_cache(self, batch: int, max_seq: int) -> Any:
        """An empty `Cache`."""

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        """See `LocalModel.step`."""

    def step_rows(self, rows: Rows) -> Tensor:
        """See `LocalModel.step_rows`."""


@dataclass
class LocalModel:
    """What one rank runs.

    Attributes:
        forward: the weights that are here, and how they are computed with.
        config: the whole model. plan: who holds what.
        reducer: where partial sums are added up.
        max_seq: positions that a cache holds.
    """

    forward: Forward
    config: ModelConfig
    plan: ShardPlan
    comm: Comm
    reducer: HiddenReducer
    max_seq: int

    @property
    def decoder(self) -> Any:
        """The local weights, for what looks inside: a `Decoder` of torch, or a `PackedDecoder`."""
        return self.forward.decoder

    def new_cache(self, batch: int = 1) -> Any:
        """An empty `Cache` for the heads that live here. Packed, `batch` is 1."""
        return self.forward.new_cache(batch, self.max_seq)

    def move_to(self, comm: Comm) -> None:
        """Go on in a rebuilt group, with the weights that are here.

        Raises:
            ValueError: this rank is another one there, or there are more or fewer: it would need other slices.
        """
        old = self.comm
        if (comm.rank, comm.world_size) != (old.rank, old.world_size):
            was, now = f"rank {old.rank} of {old.world_size}", f"rank {comm.rank} of {comm.world_size}"
            raise ValueError(f"this part of the model is that of {was}, the group makes this {now}; load it again")
        self.comm = self.reducer.comm = comm

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        """Feed tokens of one sequence, shape (1, seq). A collective.

        Returns:
            this rank's logits of the last one, shape (1, local vocabulary), f32; valid until the next step.

        Raises:
            ValueError: they don't fit the cache. Nothing was computed then, on any rank.
        """
        clock = self.reducer.clock
        clock.start()
        logits = self.forward.step(tokens, cache)
        clock.stop()
        return logits

    def step_rows(self, rows: Rows) -> Tensor:
        """Feed tokens of several sequences in one step, such as a chunk of one prompt and the last tokens of others.

        A collective: all ranks call it with the same tokens in the same order, each with its own caches. Packed ranks
        multiply all rows at once and reduce them together, twice per layer; exact ranks compute one sequence after
        another, with as many reductions each. The logits of a sequence have the same bits whatever stands beside it.

        Args:
            rows: (cache, token ids) of each sequence, every cache once, one id or more of each.

        Returns:
            this rank's logits of each sequence's last token, shape (sequences, local vocabulary), f32, in the order of
            `rows`; valid until the next step.

        Raises:
            ValueError: there are no rows, a sequence has no token, a cache stands there twice, or tokens don't fit.
                Nothing was computed then, on any rank, and no cache has changed.
        """
        check_rows(rows)
        clock = self.reducer.clock
        clock.start()
        logits = self.forward.step_rows(rows)
        clock.stop()
        return logits


def check_rows(rows: Rows) -> None:
    """Raise a ValueError unless a step can take these."""
    if not rows:
        raise ValueError("a step needs the tokens of at least one sequence")
    if len({id(cache) for cache, _ in rows}) < len(rows):
        raise ValueError("a cache stands in a step twice; give all new tokens of a sequence at once")
    for number, (cache, ids) in enumerate(rows):
        if not len(ids):
            raise ValueError(f"sequence {number} of the step has no token")
        check_fit(cache, len(ids))
