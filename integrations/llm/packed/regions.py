"""A decoder layer as two ggml graphs, each from one reduction to the next. Shapes are as ggml has them: [columns,
rows].

The attention region adds what the ranks have summed to the residual stream and normalises it. It makes queries, keys
and values, writes the cache, attends, and makes the partial products of the output projection. The MLP region does the
same for gate, up and down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.packed.graph import Graph
from hostring.integrations.llm.packed.library import Pointer
from hostring.integrations.llm.packed.memory import F16, F32, I32, I64, Arena
from hostring.integrations.llm.packed.units import Tree
from hostring.integrations.llm.packed.weights import Unit

MAX_REGION_NODES = 256
ROPE_PAIRS, ROPE_HALVES = 0, 2  # which elements of a head turn together: neighbours, or one of each half


@dataclass
class Fold:
    """One region's part in a reduction.

    Attributes:
        brings: for each slot that this rank fills, its number and how the rank's own units make it.
        n_slots: of the whole exchange.
        completes: how the exchanged slots complete the tree.
    """

    brings: list[tuple[int, Tree]]
    n_slots: int
    completes: Tree


@dataclass
class LayerWeights:
    """Tensors of one layer on one rank; None for what the model doesn't have."""

    attention_norm: Pointer
    q: Pointer
    k: Pointer
    v: Pointer
    o: list[Unit]
    mlp_norm: Pointer
    gate: Pointer
    up: Pointer
    down: list[Unit]
    biases: dict[str, Pointer] = field(default_factory=dict)
    q_norm: Pointer | None = None
    k_norm: Pointer | None = None
    rope_divisors: Pointer | None = None


@dataclass
class Exchange:
    """What enters and leaves the graphs of one number of rows.

    Attributes:
        x: the residual stream, shape (rows, hidden). slots: partial sums, shape (slots, rows, hidden).
        ids, positions, index: of the new rows.
        mask: shape (rows, cached), what each row may see; None for a single row.
    """

    x: npt.NDArray[np.float32]
    slots: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    index: npt.NDArray[np.int64]
    mask: npt.NDArray[np.float16] | None


class Regions:
    """Builds the graphs of one number of rows against one number of cached positions.

    Attributes:
        cached_views: views of keys and values whose number of positions is set before each step of a single row.
    """

    def __init__(
        self, arena: Arena, config: ModelConfig, n_rows: int, n_cached: int, n_slots: int, n_graphs: int
    ) -> None:
        self.arena, self.ggml, self.config = arena, arena.ggml, config
        self.n_rows, self.n_cached = n_rows, n_cached
        self.context = arena.context(2 * MAX_REGION_NODES * n_graphs, n_graphs, MAX_REGION_NODES)
        width = config.hidden_size
        self.exchange = Exchange(
            arena.array((n_rows, width)),
            arena.array((n_slots, n_rows, width)),
            arena.array((n_rows,), np.int32),
            arena.array((n_rows,), np.int32),
            arena.array((n_rows,), np.int64),
            None if n_rows == 1 else arena.array((n_rows, n_cached), np.float16),
        )
        e = self.exchange
        self.x = self._on(e.x, F32, width, n_rows)
        self.slots = [self._on(slot, F32, width, n_rows) for slot in e.slots]
        self.ids, self.positions, self.index = (
            self._on(a, t, n_rows) for a, t in ((e.ids, I32), (e.positions, I32), (e.index, I64))
        )
        self.mask = None if e.mask is None else self._on(e.mask, F16, n_cached, n_rows)
        self.cached_views: list[Pointer] = []
        self.graphs: list[Graph] = []

    def _on(self, array: npt.NDArray[Any], kind: int, *extents: int) -> Pointer:
        new = self.ggml.new_tensor_1d if len(extents) == 1 else self.ggml.new_tensor_2d
        return self.arena.place(new(self.context, kind, *extents), array)

    def embed(self, embedding: Pointer) -> None:
        """The graph that looks rows up: x = embedding[ids]."""
        rows = self.ggml.get_rows(self.context, embedding, self.ids)
        self._graph(self.arena.place(rows, self.exchange.x))

    def attention(self, w: LayerWeights, keys: Pointer, values: Pointer, before: Fold | None, fold: Fold) -> None:
        """The graph of an attention region. keys, values: the layer's cache, [kv_heads * head_dim, positions]."""
        g, ctx, c = self.ggml, self.context, self.config
        h = self._norm(self._residual(before), w.attention_norm)
        k_width = c.num_key_value_heads * c.head_dim
        q = self._turned(self._projected(w, "q", w.q, h), c.num_attention_heads, w.q_norm, w)
        k = self._turned(self._projected(w, "k", w.k, h), c.num_key_value_heads, w.k_norm, w)
        v = self._projected(w, "v", w.v, h)
        written = (
            g.set_rows(ctx, keys, g.reshape_2d(ctx, k, k_width, self.n_rows), self.index),
            g.set_rows(ctx, values, v, self.index),
        )
        cached = [self._cached(cache) for cache in (keys, values)]
        # [head_dim, heads, rows] -> [head_dim, rows, heads], and back in the result
        q = g.permute(ctx, q, 0, 2, 1, 3)
        scale = c.head_dim**-0.5
        mixed = g.flash_attn_ext(ctx, q, *cached, self.mask, scale, 0.0, 0.0)
        mixed = g.reshape_2d(ctx, mixed, c.num_attention_heads * c.head_dim, self.n_rows)
        self._bring(w, "o", w.o, mixed, fold, written)

    def mlp(self, w: LayerWeights, before: Fold, fold: Fold) -> None:
        """The graph of an MLP region."""
        h = self._norm(self._residual(before), w.mlp_norm)
        gate, up = self._projected(w, "gate", w.gate, h), self._projected(w, "up", w.up, h)
        self._bring(w, "down", w.down, self.ggml.swiglu_split(self.context, gate, up), fold, ())

    def head(self, norm: Pointer, weight: Pointer, logits: npt.NDArray[np.float32], before: Fold) -> None:
        """The graph of the last row's logits, shape (1, local vocabulary)."""
        g, ctx, width = self.ggml, self.context, self.config.hidden_size
        x = self._residual(before)
        last = g.view_2d(ctx, x, width, 1, 4 * width, 4 * width * (self.n_rows - 1))
        self._graph(self.arena.place(g.mul_mat(ctx, weight, self._norm(last, norm)), logits))

    def _graph(self, *tensors: Pointer) -> None:
        graph = Graph(self.arena, MAX_REGION_NODES, self.context)
        for tensor in tensors:
            graph.expand(tensor)
        self.graphs.append(graph)

    def _residual(self, before: Fold | None) -> Pointer:
        """x, to which the sum of the region before is added first."""
        if before is None:
            return self.x
        return self.ggml.add_inplace(self.context, self.x, self._fold(before.completes, self.slots[: before.n_slots]))

    def _fold(self, tree: Tree, terms: list[Pointer]) -> Pointer:
        if isinstance(tree, int):
            return terms[tree]
        return self.ggml.add(self.context, self._fold(tree[0], terms), self._fold(tree[1], terms))

    def _norm(self, x: Pointer, weight: Pointer) -> Pointer:
        return self.ggml.mul(self.context, self.ggml.rms_norm(self.context, x, self.config.rms_norm_eps), weight)

    def _projected(self, w: LayerWeights, name: str, weight: Pointer, h: Pointer) -> Pointer:
        product = self.ggml.mul_mat(self.context, weight, h)
        bias = w.biases.get(name)
        return product if bias is None else self.ggml.add(self.context, product, bias)

    def _turned(self, x: Pointer, heads: int, norm: Pointer | None, w: LayerWeights) -> Pointer:
        """Heads at their positions, [head_dim, heads, rows]."""
        g, ctx, c = self.ggml, self.context, self.config
        x = g.reshape_3d(ctx, x, c.head_dim, heads, self.n_rows)
        if norm is not None:
            x = self._norm(x, norm)
        mode = ROPE_PAIRS if c.model_type == "llama" else ROPE_HALVES
        trained, scale = c.max_position_embeddings, c.rope_scaling.attention_factor
        return g.rope_ext(
            ctx, x, self.positions, w.rope_divisors, c.head_dim, mode, trained, c.rope_theta, 1.0, 0.0, scale, 0.0, 0.0
        )

    def _cached(self, cache: Pointer) -> Pointer:
        """What is cached of one layer, [head_dim, positions, kv_heads]."""
        c = self.config
        e = 2  # bytes of a float16
        stride = c.num_key_value_heads * c.head_dim * e
        view = self.ggml.view_3d(
            self.context, cache, c.head_dim, self.n_cached, c.num_key_value_heads, stride, c.head_dim * e, 0
        )
        self.cached_views.append(view)
        return view

    def _bring(
        self, w: LayerWeights, name: str, units: list[Unit], x: Pointer, fold: Fold, first: tuple[Pointer, ...]
    ) -> None:
        """The graph that ends with this rank's slots: products of its units, folded to subtrees.

        A rank without units brings zeros, which are in its slots already.
        """
        g, ctx = self.ggml, self.context
        line = 4 * sum(unit.width for unit in units)
        products = []
        for unit in units:
            piece = x if len(units) == 1 else g.view_2d(ctx, x, unit.width, self.n_rows, line, 4 * unit.start)
            products.append(g.mul_mat(ctx, unit.tensor, piece))
        bias = w.biases.get(name)
        if bias is not None:  # on the rank that holds the first unit, whose product it joins
            products[0] = g.add(ctx, products[0], bias)
        results = [
            self.arena.place(self._fold(tree, products), self.exchange.slots[slot]) for slot, tree in fold.brings
        ]
        self._graph(*first, *results)
