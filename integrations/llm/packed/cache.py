"""A conversation's keys and values, and the graphs that run over them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hostring.integrations.llm.packed.decoder import PackedDecoder
from hostring.integrations.llm.packed.graph import Backend
from hostring.integrations.llm.packed.library import Pointer, at
from hostring.integrations.llm.packed.memory import F16, Arena
from hostring.integrations.llm.packed.regions import Fold, Regions
from hostring.integrations.llm.packed.units import Tree

POSITIONS_STEP = 256  # several rows attend to a multiple of so many cached positions, masked beyond
MAX_KEPT_SHAPES = 3  # numbers of rows and positions whose graphs are kept


class Sums(Protocol):
    """Who adds up the ranks' partial sums of a step, and may watch the residual stream."""

    def begin(self, x: npt.NDArray[np.float32]) -> None:
        """The stream of a step begins with `x`, shape (rows, hidden)."""

    def reduce(self, slots: npt.NDArray[np.float32], completes: Tree) -> None:
        """Add `slots`, shape (slots, rows, hidden), up over the ranks, in place; `completes` is how the model folds
        them."""

    def end(self, x: npt.NDArray[np.float32]) -> None:
        """The stream of the step ends with `x`."""


class _Step:
    """The graphs of one number of rows, planned."""

    def __init__(
        self, decoder: PackedDecoder, cache: Sequence[tuple[Pointer, ...]], n_rows: int, n_cached: int
    ) -> None:
        self.arena = arena = Arena(decoder.ggml)
        attention, mlp = decoder.folds
        n_layers = decoder.config.num_hidden_layers
        self.regions = r = Regions(arena, decoder.local, n_rows, n_cached, decoder.n_slots, 2 * n_layers + 2)
        self.logits = arena.array((1, len(decoder.plan.vocab_of(decoder.rank))))
        r.embed(decoder.embedding)
        before: Fold | None = None
        for layer, (keys, values) in zip(decoder.layers, cache, strict=True):
            r.attention(layer, keys, values, before, attention)
            r.mlp(layer, attention, mlp)
            before = mlp
        assert before is not None
        r.head(decoder.norm, decoder.head, self.logits, before)
        backend = Backend(arena, decoder.threads)
        self._compute, self._backend = decoder.ggml.backend_graph_plan_compute, backend.pointer
        self._plans = backend.plan(arena, r.graphs)
        self._lengths = [np.frombuffer(at(view).ne, np.int64) for view in r.cached_views] if n_rows == 1 else []
        own = [{slot for slot, _ in fold.brings} for fold in decoder.folds]
        slots = r.exchange.slots
        self._completes = [fold.completes for fold in decoder.folds]
        self._reduced = [slots[: fold.n_slots] for fold in decoder.folds]
        self._others = [
            [slots[n] for n in range(fold.n_slots) if n not in mine]
            for fold, mine in zip(decoder.folds, own, strict=True)
        ]

    def run(self, ids: Sequence[int], start: int, sums: Sums) -> npt.NDArray[np.float32]:
        """Logits of the last of `ids`, which stand at positions `start` … ."""
        e, stop = self.regions.exchange, start + len(ids)
        e.ids[:] = ids
        e.positions[:] = e.index[:] = np.arange(start, stop)
        if e.mask is not None:
            seen = np.arange(self.regions.n_cached) <= np.arange(start, stop)[:, None]
            e.mask[:] = np.where(seen, np.float16(0), np.float16(-np.inf))
        for lengths in self._lengths:
            lengths[1] = stop
        compute, backend = self._compute, self._backend
        compute(backend, self._plans[0])
        sums.begin(e.x)
        for n, plan in enumerate(self._plans[1:-1]):
            compute(backend, plan)
            for slot in self._others[n & 1]:
                slot.fill(-0.0)  # which changes no number and no zero
            sums.reduce(self._reduced[n & 1], self._completes[n & 1])
        compute(backend, self._plans[-1])
        sums.end(e.x)
        return self.logits


class _Memory:
    """Keys and values of one conversation, and the graphs that were made over them. It serves one cache after
    another."""

    def __init__(self, decoder: PackedDecoder, max_seq: int) -> None:
        config = decoder.local
        width = config.num_key_value_heads * config.head_dim
        n_positions = -(-max_seq // POSITIONS_STEP) * POSITIONS_STEP
        arena = self._arena = Arena(decoder.ggml)
        self.kv = arena.array((config.num_hidden_layers, 2, n_positions, width), np.float16)
        context = arena.context(2 * config.num_hidden_layers)
        new = decoder.ggml.new_tensor_2d
        self.tensors = [
            tuple(arena.place(new(context, F16, width, n_positions), half) for half in layer) for layer in self.kv
        ]
        self._decoder = decoder
        self._steps: dict[tuple[int, int], _Step] = {}

    def step_of(self, n_rows: int, stop: int) -> _Step:
        """The graphs for so many rows, the last of which is position `stop` - 1."""
        n_cached = POSITIONS_STEP if n_rows == 1 else -(-stop // POSITIONS_STEP) * POSITIONS_STEP
        found = self._steps.get((n_rows, n_cached))
        if found is None:
            for key in [key for key in self._steps if key[0] != 1][: len(self._steps) + 1 - MAX_KEPT_SHAPES]:
                del self._steps[key]
            found = self._steps[n_rows, n_cached] = _Step(self._decoder, self.tensors, n_rows, n_cached)
        return found


class PackedCache:
    """Keys and values of the heads that live on this rank, in float16, preallocated.

    Attributes:
        length: positions filled so far. max_seq: how many fit. nbytes: memory taken, all of it from the start.
    """

    batch = 1

    def __init__(self, decoder: PackedDecoder, max_seq: int) -> None:
        self.max_seq, self.length = max_seq, 0
        spare = decoder.spare_memory.get(max_seq)
        self._memory: _Memory = spare.pop() if spare else _Memory(decoder, max_seq)
        self.nbytes = self._memory.kv.nbytes
        weakref.finalize(self, decoder.spare_memory.setdefault(max_seq, deque(maxlen=1)).append, self._memory)

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on; the memory stays."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the KV cache holds {self.length} positions; it can't be cut to {length}")
        self.length = length

    def step(self, ids: Sequence[int], sums: Sums) -> npt.NDArray[np.float32]:
        """Feed ids; returns this rank's logits of the last one, shape (1, local vocabulary), valid until the next step.

        Args:
            sums: adds up over the ranks.

        Raises:
            ValueError: they don't fit.
        """
        stop = self.length + len(ids)
        if stop > self.max_seq:
            raise ValueError(
                f"KV cache holds {self.max_seq} positions, {self.length} are taken and {len(ids)} more are needed; "
                "raise max_seq"
            )
        logits = self._memory.step_of(len(ids), stop).run(ids, self.length, sums)
        self.length = stop
        return logits
