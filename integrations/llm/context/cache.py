"""The part of a KV cache that one rank holds: every so many-th block of positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hostring.integrations.llm.model.attention_kind import AttentionKind
from hostring.integrations.llm.model.cache import check_fit
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.partial_attention import Partial, partial_attention

Merge = Callable[[Partial], Tensor]
"""From this rank's part of attention to what its output projection multiplies, shape (1, queries, columns)."""


@dataclass(frozen=True)
class PositionShard:
    """Block b of `block` positions belongs to shard b % `count`, so that shards stay equal while a text grows.

    Attributes:
        number: of this shard.
    """

    number: int
    count: int
    block: int

    def n_held(self, length: int) -> int:
        """How many of the first `length` positions are in this shard."""
        rounds, rest = divmod(length, self.block * self.count)
        return rounds * self.block + min(self.block, max(0, rest - self.number * self.block))

    def positions(self, n_held: int) -> Tensor:
        """The first `n_held` positions of this shard, ascending."""
        own = torch.arange(n_held)
        rounds = torch.div(own, self.block, rounding_mode="floor")
        return (rounds * self.count + self.number) * self.block + own % self.block


@dataclass(frozen=True)
class ContextSlot:
    """One layer of a step, see `KVSlot`.

    Attributes:
        start: position of the first new one. n_new: how many there are.
        own: which of them belong to this shard, as indices among the new ones.
        fresh: where those are written, shape (2 kv_heads, own, head_dim), keys before values.
        keys, values: all of this shard with the new ones, shape (kv_heads, held, head_dim).
        positions: of these, shape (held,).
        merge: see `Merge`. A collective of the ranks that hold the same heads.
    """

    start: int
    n_new: int
    own: Tensor
    fresh: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    merge: Merge

    def attend(self, q: Tensor, kv: Tensor, kind: AttentionKind) -> Tensor:
        """See `KVSlot.attend`. The result has those columns alone that this rank's output projection multiplies."""
        self.fresh.copy_(kv[0, self.own].transpose(0, 1))
        heads = q[0].transpose(0, 1)  # (heads, queries, head_dim)
        return self.merge(partial_attention(heads, self.keys, self.values, self.start, self.positions, kind))


class ContextCache:
    """Room for one shard of `max_seq` positions of one sequence, in every layer, filled from the front.

    Attributes:
        length: positions filled so far, over all shards. max_seq: the most.
        nbytes: memory taken on this rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: PositionShard,
        max_seq: int,
        dtype: torch.dtype,
        device: torch.device,
        merge: Merge,
    ) -> None:
        self.max_seq, self.length = max_seq, 0
        self._shard, self._merge = shard, merge
        capacity = shard.n_held(max_seq)
        shape = (config.num_hidden_layers, 2 * config.num_key_value_heads, capacity, config.head_dim)
        self._kv = torch.zeros(shape, dtype=dtype, device=device)
        self._positions = shard.positions(capacity).to(device)
        self.nbytes = self._kv.nbytes

    def extend(self, n_positions: int) -> list[ContextSlot]:
        """Take `n_positions` more, on all ranks, and return one slot per layer.

        Raises:
            ValueError: they don't fit.
        """
        check_fit(self, n_positions)
        start, stop = self.length, self.length + n_positions
        self.length = stop
        first, held = self._shard.n_held(start), self._shard.n_held(stop)
        own, positions = self._positions[first:held] - start, self._positions[:held]
        slots = []
        for layer in self._kv.unbind(0):
            keys, values = layer[:, :held].chunk(2)
            fresh = layer[:, first:held]
            slots.append(ContextSlot(start, n_positions, own, fresh, keys, values, positions, self._merge))
        return slots

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on; the memory stays."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the KV cache holds {self.length} positions; it can't be cut to {length}")
        self.length = length

    def clear(self) -> None:
        """Forget every position; the memory stays."""
        self.length = 0
