"""Steps of a packed decoder: the graphs of each shape of a step, planned when it first comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hostring.integrations.llm.model.cache import check_fit
from hostring.integrations.llm.model.regions import layers_of
from hostring.integrations.llm.packed.cache import POSITIONS_STEP, PackedCache, whole_steps
from hostring.integrations.llm.packed.decoder import PackedDecoder
from hostring.integrations.llm.packed.exchange import Exchange, Shape, rows_of
from hostring.integrations.llm.packed.experts import ExpertMatrices
from hostring.integrations.llm.packed.graph import Backend
from hostring.integrations.llm.packed.memory import Arena
from hostring.integrations.llm.packed.regions import Fold, LayerGraphs, StepGraphs
from hostring.integrations.llm.packed.units import Tree

MAX_KEPT_SHAPES = 3  # with several rows of a sequence, whose graphs are kept
MAX_KEPT_SINGLES = 16  # with single rows alone
MAX_KEPT_EVERY = 4  # with the logits of every row

Rows = Sequence[tuple[PackedCache, Sequence[int]]]
Stream = npt.NDArray[np.float32]


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
    """The graphs of one shape, planned."""

    def __init__(self, decoder: PackedDecoder, shape: Shape, every: bool, joined: bool) -> None:
        local, arena = decoder.local, Arena(decoder.ggml)
        layers = layers_of(local)
        width = local.num_attention_heads * local.head_dim
        sizes = (local.hidden_size, width, decoder.n_slots, decoder.n_logits, decoder.n_head_rows)
        self.exchange = e = Exchange(arena, rows_of(shape), *sizes, every)
        n_choices = 0 if local.experts is None else len(layers)
        self._graphs = graphs = StepGraphs(arena, local, e, 2 + sum(map(len, layers)) + n_choices, joined)
        if decoder.embedding is not None:
            graphs.embed(decoder.embedding)
        for regions, weights in zip(layers, decoder.layers, strict=True):
            ops = LayerGraphs(graphs, weights, decoder.folds, decoder.rope_divisors)
            for region in regions:
                region.run(ops, graphs.inputs.x)
        graphs.end(decoder.norm, decoder.head)
        backend = Backend(arena, decoder.threads, reference=decoder.batch_invariant or not decoder.repacked)
        self._compute, self._backend = decoder.ggml.backend_graph_plan_compute, backend.pointer
        plans = backend.plan(arena, graphs.graphs)
        for cached in graphs.caches:
            cached.plan_is_made()
        self._result = e.x if decoder.head is None else e.logits
        self._last = plans[-1]
        self._n_before = int(decoder.embedding is not None)  # graphs before the first layer
        between = [] if joined else zip(plans[:-1], graphs.then[:-1], strict=True)
        self._between = [(plan, self._then(then)) for plan, then in between]

    def _then(self, then: Fold | ExpertMatrices | None) -> Callable[[Sums | None], None]:
        """What is to be done after a graph."""
        e = self.exchange
        if then is None:
            return lambda sums: None
        if isinstance(then, ExpertMatrices):
            routed = self._graphs.routed
            assert routed is not None
            return lambda sums: routed.choose(then)
        own = {slot for slot, _ in then.brings}
        others, slots = [e.slots[n] for n in range(then.n_slots) if n not in own], e.slots[: then.n_slots]

        def reduce(sums: Sums | None) -> None:
            if sums is not None:
                for slot in others:
                    slot.fill(-0.0)  # which changes no number and no zero
                sums.reduce(slots, then.completes)

        return reduce

    def run(self, rows: Rows, sums: Sums | None, stream: Stream | None) -> Stream:
        """The logits that are wanted of `rows`, which are shaped as the graphs are; without a head, the stream."""
        e, compute, backend = self.exchange, self._compute, self._backend
        for sequence, cached, (cache, ids) in zip(e.sequences, self._graphs.caches, rows, strict=True):
            e.fill(sequence, ids, cache.length)
            cached.point_at(cache, cache.length + len(ids))
        if stream is not None:
            e.x[:] = stream
        for n, (plan, then) in enumerate(self._between):
            if sums is not None and n == self._n_before:
                sums.begin(e.x)
            compute(backend, plan)
            then(sums)
        compute(backend, self._last)
        if sums is not None:
            sums.end(e.x)
        return self._result


class Steps:
    """Runs steps of a decoder, and keeps the graphs of the shapes that came last.

    Args:
        sums: adds up over the ranks; None on a single rank, which then computes a step in one graph, unless a router
            is to choose in between.
    """

    def __init__(self, decoder: PackedDecoder, sums: Sums | None) -> None:
        self._decoder, self._sums = decoder, sums
        self._kept: dict[tuple[Shape, bool], _Step] = {}

    def run(self, rows: Rows, stream: Stream | None = None, every: bool = False) -> Stream:
        """Feed the ids of each sequence to its own cache.

        Args:
            rows: (cache, ids) of each sequence, the one with the most ids first.
            stream: of all rows, shape (rows, hidden), where this rank has no embedding.
            every: the logits of all ids are wanted.

        Returns:
            this rank's logits of each sequence's last id, shape (sequences, local vocabulary), or of all of them, shape
            (ids, local vocabulary); without a head, the stream of all rows, shape (rows, hidden). Valid until the next
            step.

        Raises:
            ValueError: they don't fit.
        """
        for cache, ids in rows:
            check_fit(cache, len(ids))
        shape = tuple((len(ids), _n_cached(len(ids), cache.length + len(ids))) for cache, ids in rows)
        found = self._step_of(shape, every and not _single(shape)).run(rows, self._sums, stream)
        for cache, ids in rows:
            cache.length += len(ids)
        return found

    def _step_of(self, shape: Shape, every: bool) -> _Step:
        key = (shape, every)
        found = self._kept.pop(key, None)
        if found is None:
            limit = MAX_KEPT_EVERY if every else MAX_KEPT_SINGLES if _single(shape) else MAX_KEPT_SHAPES
            same = [kept for kept in self._kept if (_single(kept[0]), kept[1]) == (_single(shape), every)]
            for oldest in same[: len(same) + 1 - limit]:
                del self._kept[oldest]
            joined = self._sums is None and self._decoder.config.experts is None
            found = _Step(self._decoder, shape, every, joined)
        self._kept[key] = found  # the latest last
        return found


def _single(shape: Shape) -> bool:
    return shape[0][0] == 1


def _n_cached(n_rows: int, stop: int) -> int:
    """Positions that the graphs of so many rows read, the last of which is position `stop` - 1."""
    return POSITIONS_STEP if n_rows == 1 else whole_steps(stop)
