"""The exchange after attention: the parts of the ranks that hold the same heads become what each of them multiplies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.model.audit import Clock
from hostring.integrations.llm.model.partial_attention import Partial, merged

EXTRA = 2  # values beside those of a head: the peak and the total


@dataclass
class Merging:
    """Each rank gets the parts of those heads that its output projection reads, from all shards, and folds them in the
    order of ranks.

    What a rank sends for a row depends on heads and ranks, and not on how many positions there are.

    Attributes:
        comm: the ranks that hold the same heads, in the order of their shards.
        columns: of the output projection, by rank of `comm`, counted from the first of these heads.
        head_dim: of the model. clock: stands still during the exchange.
    """

    comm: Comm
    columns: tuple[range, ...]
    head_dim: int
    clock: Clock

    @property
    def n_heads(self) -> int:
        """Heads of which each rank gets the parts: as many for all, so that nothing has to say how many come."""
        return max(len(self._read_by(rank)) for rank in range(len(self.columns)))

    @property
    def elements(self) -> int:
        """f32 elements that a rank brings to the exchange of one row."""
        return len(self.columns) * self.n_heads * (self.head_dim + EXTRA)

    def __call__(self, part: Partial) -> Tensor:
        """What this rank's output projection multiplies, shape (1, queries, columns), f32. A collective."""
        packed, n_heads = part.packed(), self.n_heads
        firsts = [min(self._read_by(rank).start, packed.shape[0] - n_heads) for rank in range(len(self.columns))]
        sent = torch.stack([packed[first : first + n_heads] for first in firsts])
        self.clock.stop()
        if sent.is_cpu:
            received = torch.from_numpy(np.asarray(self.comm.all_to_all(sent.numpy())))
        else:
            received = self.comm.all_to_all(sent)
        self.clock.start()
        heads = merged(Partial.unpacked(received))  # (n_heads, queries, head_dim)
        rows = heads.transpose(0, 1).flatten(1)
        own, first = self.columns[self.comm.rank], firsts[self.comm.rank] * self.head_dim
        return rows[None, :, own.start - first : own.stop - first]

    def _read_by(self, rank: int) -> range:
        """Heads whose values the output projection of `rank` reads."""
        own = self.columns[rank]
        return range(own.start // self.head_dim, -(-own.stop // self.head_dim))
