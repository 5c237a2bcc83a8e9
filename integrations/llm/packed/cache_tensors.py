"""What the graphs of a step read and write of one sequence's cache, whichever cache that is.

Graphs outlive conversations, and a step's sequences are not those of the next. So tensors of keys and values are made
over memory that stands in for a cache, and are pointed at the sequence's own before a step.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.packed.exchange import SequenceRows
from hostring.integrations.llm.packed.library import Pointer, Tensor, at
from hostring.integrations.llm.packed.memory import F16, Arena

FLOAT16_NBYTES = 2


class Halves(Protocol):
    """Memory of keys and values: those of layer n begin `2 * n` and `2 * n + 1` times `half_nbytes` after `address`.

    Attributes:
        n_positions: of each.
    """

    address: int
    half_nbytes: int
    n_positions: int


class CacheTensors:
    """The tensors of one sequence, made layer by layer, keys before values."""

    def __init__(self, arena: Arena, context: Pointer, config: ModelConfig, sequence: SequenceRows) -> None:
        self._arena, self._context, self._config, self._sequence = arena, context, config, sequence
        self._width = config.num_key_value_heads * config.head_dim
        self._stand_in = arena.array((sequence.n_cached, self._width), np.float16)
        self._buffer = arena.buffer(self._stand_in.ctypes.data, self._stand_in.nbytes)
        self._written: list[Tensor] = []
        self._read: list[Tensor] = []
        self._pointed_at: tuple[int, int] | None = None

    def half(self, rows: Pointer, index: Pointer) -> tuple[Pointer, Pointer]:
        """The node that writes new rows of keys or of values, [kv_heads * head_dim, rows], at the positions of `index`;
        and the view of what is cached then, [head_dim, positions, kv_heads]."""
        g, ctx, c, n_cached = self._arena.ggml, self._context, self._config, self._sequence.n_cached
        whole = g.new_tensor_2d(ctx, F16, self._width, n_cached)
        self._arena.place_at(whole, self._buffer, self._stand_in.ctypes.data)
        written = g.set_rows(ctx, whole, rows, index)
        head, line = FLOAT16_NBYTES * c.head_dim, FLOAT16_NBYTES * self._width
        read = g.view_3d(ctx, whole, c.head_dim, n_cached, c.num_key_value_heads, line, head, 0)
        self._written.append(at(written))
        self._read.append(at(read))
        return written, read

    def plan_is_made(self) -> None:
        """Every tensor has its memory: from now on it may be pointed elsewhere."""
        single = self._sequence.n_rows == 1
        self._lengths = [np.frombuffer(read.ne, np.int64) for read in self._read] if single else []

    def point_at(self, memory: Halves, n_positions: int) -> None:
        """Let the next step write to `memory`, and a single row attend to its first `n_positions`."""
        place = (memory.address, memory.n_positions)
        if self._pointed_at != place:
            self._pointed_at = place
            for half, (written, read) in enumerate(zip(self._written, self._read, strict=True)):
                written.data = read.data = memory.address + half * memory.half_nbytes
                written.ne[1] = memory.n_positions
        for length in self._lengths:
            length[1] = n_positions
