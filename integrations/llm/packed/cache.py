"""A sequence's keys and values on a packed rank."""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch

from hostring.integrations.llm.model.config import ModelConfig

POSITIONS_STEP = 256  # several rows attend to a multiple of so many cached positions, masked beyond


class PackedCache:
    """Keys and values of the heads that live on this rank, in float16, preallocated.

    Args:
        config: shapes of this rank's part of the model.

    Attributes:
        length: positions filled so far. max_seq: how many fit. nbytes: memory taken; the system gives it as it is
            filled.
        kv: shape (layers, 2, positions, kv_heads * head_dim), keys before values. The others: see `Halves`.
    """

    batch = 1

    def __init__(self, config: ModelConfig, max_seq: int) -> None:
        self.max_seq, self.length = max_seq, 0
        self.n_positions = whole_steps(max_seq)
        width = config.num_key_value_heads * config.head_dim
        shape = config.num_hidden_layers, 2, self.n_positions, width
        self.kv = np.frombuffer(_small_pages(2 * math.prod(shape)), np.float16).reshape(shape)
        self._head_dim = config.head_dim
        self.nbytes, self.address, self.half_nbytes = self.kv.nbytes, self.kv.ctypes.data, self.kv[0, 0].nbytes

    def rows(self, layer: int, start: int, stop: int) -> torch.Tensor:
        """See `KVCache.rows`."""
        return torch.from_numpy(self.kv[layer, :, start:stop]).view(2, stop - start, -1, self._head_dim)

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on; the memory stays."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the KV cache holds {self.length} positions; it can't be cut to {length}")
        self.length = length


def _small_pages(nbytes: int) -> mmap.mmap:
    """Zeroed memory that is taken in small pages, as it is filled. numpy asks for huge pages: then the first positions
    of each layer clear megabytes, which took hundreds of milliseconds of the first step of each conversation."""
    return mmap.mmap(-1, max(nbytes, 1))


def whole_steps(n_positions: int) -> int:
    """The positions that rows read when so many are filled."""
    return -(-n_positions // POSITIONS_STEP) * POSITIONS_STEP
