"""One rank's view of a KV cache while ranks compute rows of one chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.model.attention import attend
from hostring.integrations.llm.model.attention_kind import AttentionKind
from hostring.integrations.llm.model.audit import Clock
from hostring.integrations.llm.model.cache import KVCache, KVSlot


class DividedRows:
    """See `KVCache`: this rank's rows begin after those of the ranks before it.

    Args:
        cache: of the sequence. It gets the keys and values of all rows of the chunk.
        counts: rows of each rank. clock: stands still while rows are exchanged.
    """

    def __init__(self, cache: KVCache, comm: Comm, counts: Sequence[int], clock: Clock) -> None:
        self.max_seq, self.length = cache.max_seq, cache.length + sum(counts[: comm.rank])
        self._cache, self._comm, self._counts, self._clock = cache, comm, counts, clock

    def extend(self, n_positions: int) -> list[_GatheredSlot]:
        """See `KVCache.extend`. n_positions: of this rank."""
        slots = self._cache.extend(sum(self._counts))
        return [_GatheredSlot(slot, self.length, self._comm, self._counts, self._clock) for slot in slots]


class _GatheredSlot:
    """See `Slot`: new keys and values are exchanged, and this rank's queries see what is up to its last row.

    Args:
        slot: of all rows of the chunk. start: position of this rank's first row.
    """

    def __init__(self, slot: KVSlot, start: int, comm: Comm, counts: Sequence[int], clock: Clock) -> None:
        self._slot, self._start, self._comm, self._counts, self._clock = slot, start, comm, counts, clock

    @property
    def n_new(self) -> int:
        """See `Slot`."""
        return self._counts[self._comm.rank]

    def attend(self, q: Tensor, kv: Tensor, kind: AttentionKind) -> Tensor:
        """See `Slot`. Gives this rank's keys and values to all, in f32, and stores those of all."""
        self._clock.stop()
        mine = kv[0].float().flatten(1).cpu().contiguous()  # (rows, 2 kv_heads * head_dim)
        whole = torch.from_numpy(self._comm.all_gather(mine.numpy(), counts=self._counts))
        self._slot.fresh.copy_(whole.view(1, -1, *kv.shape[2:]).transpose(1, 2))
        self._clock.start()
        stop = self._start + self.n_new
        return attend(q, self._slot.keys[:, :, :stop], self._slot.values[:, :, :stop], self._start, kind)
