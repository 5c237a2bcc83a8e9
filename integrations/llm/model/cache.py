"""Keys and values of the heads that live on this rank, preallocated."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hostring.integrations.llm.model.attention import attend
from hostring.integrations.llm.model.attention_kind import AttentionKind
from hostring.integrations.llm.model.config import ModelConfig


class Cache(Protocol):
    """Keys and values of one sequence; made by the model that uses it, and by no other's."""

    length: int
    max_seq: int

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on."""


def check_fit(cache: Cache, n_positions: int) -> None:
    """Raise a ValueError unless a cache has room for so many more positions."""
    if cache.length + n_positions > cache.max_seq:
        raise ValueError(
            f"KV cache holds {cache.max_seq} positions, {cache.length} are taken and {n_positions} more are needed; "
            "raise max_seq"
        )


class Slot(Protocol):
    """One layer's part of a cache, in one step."""

    @property
    def n_new(self) -> int:
        """How many positions are new."""

    def attend(self, q: Tensor, kv: Tensor, kind: AttentionKind) -> Tensor:
        """Store new keys and values, and attend to all that there are.

        Args:
            q: shape (batch, new positions, heads, head_dim).
            kv: shape (batch, new positions, 2 kv_heads, head_dim), keys before values.
            kind: which positions a query sees.

        Returns:
            shape (batch, new positions, what the output projection multiplies).
        """


class KVSlot(NamedTuple):
    """Where one layer writes the new positions of this step, and what it reads.

    Attributes:
        start: position of the first new one.
        fresh: to be written, shape (batch, 2 kv_heads, new positions, head_dim), keys before values.
        row: the same memory without batch and positions, shape (2 kv_heads, head_dim), where both are 1.
        keys: everything so far with the new ones, shape (batch, kv_heads, start + new positions, head_dim).
        values: same shape.
    """

    start: int
    fresh: Tensor
    row: Tensor
    keys: Tensor
    values: Tensor

    @property
    def n_new(self) -> int:
        """See `Slot`."""
        return self.fresh.shape[2]

    def attend(self, q: Tensor, kv: Tensor, kind: AttentionKind) -> Tensor:
        """See `Slot`."""
        self.fresh.copy_(kv.transpose(1, 2))
        return attend(q, self.keys, self.values, self.start, kind)


class KVCache:
    """Room for `max_seq` positions of every layer, filled from the front.

    Attributes:
        length: positions filled so far, the same for every sequence of the batch.
        nbytes: memory taken, all of it from the start.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int = 1,
        max_seq: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.max_seq = config.max_position_embeddings if max_seq is None else max_seq
        self.batch = batch
        shape = (config.num_hidden_layers, batch, 2 * config.num_key_value_heads, self.max_seq, config.head_dim)
        self._kv = torch.zeros(shape, dtype=dtype, device=device)
        self.nbytes = self._kv.nbytes
        self.length = 0

    def extend(self, n_positions: int) -> list[KVSlot]:
        """Take `n_positions` more and return one slot per layer.

        Raises:
            ValueError: they don't fit.
        """
        check_fit(self, n_positions)
        start, stop = self.length, self.length + n_positions
        self.length = stop
        fresh = self._kv[:, :, :, start:stop]
        keys, values = self._kv[:, :, :, :stop].chunk(2, 2)
        views = (fresh.unbind(0), fresh[:, 0, :, 0].unbind(0), keys.unbind(0), values.unbind(0))
        return [KVSlot(start, *layer) for layer in zip(*views, strict=True)]

    def rows(self, layer: int, start: int, stop: int) -> Tensor:
        """Keys and values of one layer's positions, of one sequence, shape (2, positions, kv_heads, head_dim), keys
        first. Writing to it changes the cache; `length` stays."""
        stored = self._kv[layer, 0, :, start:stop]  # (2 kv_heads, positions, head_dim)
        return stored.view(2, -1, *stored.shape[1:]).transpose(1, 2)

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on; the memory stays."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the KV cache holds {self.length} positions; it can't be cut to {length}")
        self.length = length

    def clear(self) -> None:
        """Forget every position; the memory stays."""
        self.length = 0
