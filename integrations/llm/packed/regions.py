"""The operations of a layer as nodes of ggml graphs, one graph from each reduction to the next. Shapes are as ggml has
them: [columns, rows].

A graph begins by adding what the ranks have summed to the residual stream, and ends with this rank's partial products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hostring.integrations.llm.checkpoint.gguf_config import INTERLEAVED
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.regions import Attention, Experts, GatedMlp, Region
from hostring.integrations.llm.packed.cache_tensors import CacheTensors
from hostring.integrations.llm.packed.exchange import Exchange, SequenceRows
from hostring.integrations.llm.packed.experts import ExpertMatrices, ExpertNodes, RoutedRows
from hostring.integrations.llm.packed.graph import Graph
from hostring.integrations.llm.packed.library import Pointer, at
from hostring.integrations.llm.packed.memory import Arena
from hostring.integrations.llm.packed.units import Tree
from hostring.integrations.llm.packed.weights import Unit

MAX_REGION_NODES = 192  # of a region, apart from what each sequence adds
MAX_SEQUENCE_NODES = 16  # that each sequence adds to attention
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
class Matrices:
    """The weights of a region on one rank. A bias is None where the model has none.

    Attributes:
        norm: of the residual stream.
        first: those that read it, each with its bias: queries, keys and values; or gate and up.
        last: the units of the one that writes to it. last_bias: on one rank only.
        q_norm, k_norm: of queries and keys.
        experts: where the first and the last are those of many experts, how a row chooses some.
    """

    norm: Pointer
    first: list[tuple[Pointer, Pointer | None]]
    last: list[Unit]
    last_bias: Pointer | None = None
    q_norm: Pointer | None = None
    k_norm: Pointer | None = None
    experts: ExpertMatrices | None = None


class StepGraphs:
    """The graphs of one shape of a step, in order: embedding, regions, head.

    Args:
        n_graphs: how many that is.
        joined: one graph computes all, since no other rank has anything to add in between.

    Attributes:
        exchange: what enters and leaves them. caches: what they read and write of each sequence's cache.
    """

    def __init__(
        self, arena: Arena, config: ModelConfig, exchange: Exchange, n_graphs: int, joined: bool = False
    ) -> None:
        self.arena, self.ggml, self.config, self.exchange = arena, arena.ggml, config, exchange
        self.n_rows = exchange.n_rows
        nodes = MAX_REGION_NODES + MAX_SEQUENCE_NODES * len(exchange.sequences)
        self._joined, self._max_nodes = joined, nodes * n_graphs if joined else nodes
        self.context = arena.context(2 * nodes * n_graphs, 1 if joined else n_graphs, self._max_nodes)
        self.inputs = exchange.tensors(self.context)
        self.caches = [CacheTensors(arena, self.context, config, sequence) for sequence in exchange.sequences]
        self.routed = None if config.experts is None else RoutedRows(arena, self.context, exchange.x, config.experts)
        self.before: Fold | None = None  # the reduction whose sum is not yet in the stream
        self.graphs: list[Graph] = []
        self.then: list[Fold | ExpertMatrices | None] = []  # what follows each graph: a reduction, a choice, or nothing

    def embed(self, embedding: Pointer) -> None:
        """The graph that looks rows up: x = embedding[ids]."""
        rows = self.ggml.get_rows(self.context, embedding, self.inputs.ids)
        self.end_graph(self.arena.place(rows, self.exchange.x))

    def end(self, norm: Pointer, head: Pointer | None) -> None:
        """The graph of the logits that are wanted; without a head, or without rows of it, of the stream."""
        g, ctx = self.ggml, self.context
        if head is None or not at(head).ne[1]:
            self.end_graph(self.stream())
            return
        x, n_wanted = self.stream(), len(self.exchange.last)
        if n_wanted == 1:
            width = self.config.hidden_size
            x = g.view_2d(ctx, x, width, 1, 4 * width, 4 * width * (self.n_rows - 1))
        elif n_wanted < self.n_rows:
            x = g.get_rows(ctx, x, self.inputs.last)
        self.end_graph(self.arena.place(g.mul_mat(ctx, head, self.norm(x, norm)), self.exchange.head_rows))

    def stream(self) -> Pointer:
        """x, to which the sum of the region before is added first."""
        x, fold = self.inputs.x, self.before
        if fold is None:
            return x
        self.before = None
        return self.ggml.add_inplace(self.context, x, self.fold(fold.completes, self.inputs.slots[: fold.n_slots]))

    def fold(self, tree: Tree, terms: list[Pointer]) -> Pointer:
        """The sum of `terms` in the order of `tree`."""
        if isinstance(tree, int):
            return terms[tree]
        return self.ggml.add(self.context, self.fold(tree[0], terms), self.fold(tree[1], terms))

    def norm(self, x: Pointer, weight: Pointer) -> Pointer:
        """RMSNorm along columns."""
        return self.ggml.mul(self.context, self.ggml.rms_norm(self.context, x, self.config.rms_norm_eps), weight)

    def end_graph(self, *tensors: Pointer, then: Fold | ExpertMatrices | None = None) -> None:
        """One graph that computes these, in this order, and what is to be done then."""
        if not (self._joined and self.graphs):
            self.graphs.append(Graph(self.arena, self._max_nodes, self.context))
            self.then.append(then)
        for tensor in tensors:
            self.graphs[-1].expand(tensor)


class LayerGraphs:
    """See `Operations`: each adds nodes. Queries, keys and values are passed on as a list of three, gate and up as one
    of two.

    Args:
        weights: of each region, by its side.
        folds: the same of its reduction.
        rope_divisors: of rotary frequencies, [head_dim / 2].
    """

    def __init__(
        self, graphs: StepGraphs, weights: dict[str, Matrices], folds: dict[str, Fold], rope_divisors: Pointer | None
    ) -> None:
        self.graphs, self.ggml, self.context = graphs, graphs.ggml, graphs.context
        self.weights, self.folds, self.rope_divisors = weights, folds, rope_divisors
        self._first: list[Pointer] = []  # computed before what a region brings

    def norm(self, h: Any, region: Region) -> Any:
        return self.graphs.norm(self.graphs.stream(), self.weights[region.side].norm)

    def project(self, x: Any, region: Region) -> Any:
        g, ctx = self.ggml, self.context
        products = [(g.mul_mat(ctx, weight, x), bias) for weight, bias in self.weights[region.side].first]
        return [product if bias is None else g.add(ctx, product, bias) for product, bias in products]

    def norm_heads(self, heads: Any, region: Attention) -> Any:
        w, (q, k, v) = self.weights[region.side], self._by_head(heads, region)
        return [self.graphs.norm(q, w.q_norm), self.graphs.norm(k, w.k_norm), v]

    def turn(self, heads: Any, region: Attention) -> Any:
        c = self.graphs.config
        mode = ROPE_PAIRS if c.model_type in INTERLEAVED else ROPE_HALVES
        trained, theta, scale = c.max_position_embeddings, c.rope_theta, c.rope_scaling.attention_factor
        places = (self.graphs.inputs.positions, self.rope_divisors, region.head_dim, mode, trained)
        q, k, v = self._by_head(heads, region)
        if not region.rotates:
            return [q, k, v]
        return [*(self.ggml.rope_ext(self.context, x, *places, theta, 1.0, 0.0, scale, 0.0, 0.0) for x in (q, k)), v]

    def attend(self, heads: Any, region: Attention) -> Any:
        """Every sequence over its own cache; results stand beside each other as rows of one matrix."""
        g, ctx, graphs = self.ggml, self.context, self.graphs
        q, k, v = heads
        kv_width, width = region.kv_heads * region.head_dim, region.heads * region.head_dim
        k, found = g.reshape_2d(ctx, k, kv_width, graphs.n_rows), []
        for sequence, cached in zip(graphs.exchange.sequences, graphs.caches, strict=True):
            index = graphs.inputs.index(sequence)
            (new_keys, keys), (new_values, values) = (
                cached.half(self._rows(new, kv_width, sequence), index) for new in (k, v)
            )
            self._first += [new_keys, new_values]
            asked = g.reshape_3d(ctx, self._rows(q, width, sequence), region.head_dim, region.heads, sequence.n_rows)
            asked = g.permute(ctx, asked, 0, 2, 1, 3)  # [head_dim, rows, heads], and back in the result
            mask = graphs.inputs.masks[sequence.number]
            found.append(g.flash_attn_ext(ctx, asked, keys, values, mask, region.head_dim**-0.5, 0.0, 0.0))
        if len(found) == 1:
            return g.reshape_2d(ctx, found[0], width, graphs.n_rows)
        for x, sequence in zip(found, graphs.exchange.sequences, strict=True):
            self._first.append(graphs.exchange.place_rows(x, sequence))
        return graphs.inputs.mixed

    def _rows(self, x: Pointer, width: int, sequence: SequenceRows) -> Pointer:
        """The rows of one sequence, [width, rows]; where it is alone, x as it is."""
        if sequence.n_rows == self.graphs.n_rows:
            return x
        return self.ggml.view_2d(self.context, x, width, sequence.n_rows, 4 * width, 4 * width * sequence.first)

    def gate(self, gate_up: Any, region: GatedMlp) -> Any:
        return self.ggml.swiglu_split(self.context, *gate_up)

    def norm_across(self, heads: Any, x: Any, region: Attention) -> Any:
        raise NotImplementedError("norms over all heads are refused before graphs are made")

    def route(self, h: Any, x: Any, region: Experts) -> Any:
        """A graph ends with the scores of all experts."""
        routed, weights = self.graphs.routed, self.weights[region.side].experts
        assert routed is not None
        assert weights is not None
        self.graphs.end_graph(*routed.scored(self.context, x, weights), then=weights)
        return ExpertNodes(self.ggml, self.context, routed, weights)

    def gate_experts(self, x: Any, routes: Any, region: Experts) -> Any:
        """What the last matrices of the experts multiply, with the nodes of these experts."""
        return routes, routes.gated([matrices for matrices, _ in self.weights[region.side].first])

    def add_sum(self, h: Any, x: Any, region: Region) -> Any:
        """The graph ends with this rank's slots: products of its units, folded to subtrees.

        A rank without units brings zeros, which are in its slots already.
        """
        g, ctx, graphs, w = self.ggml, self.context, self.graphs, self.weights[region.side]
        fold, products = self.folds[region.side], self._products(x, w.last, region)
        if w.last_bias is not None:  # on the rank that holds the first unit, whose product it joins
            products[0] = g.add(ctx, products[0], w.last_bias)
        slots = graphs.exchange.slots
        results = [graphs.arena.place(graphs.fold(tree, products), slots[slot]) for slot, tree in fold.brings]
        graphs.end_graph(*self._first, *results, then=fold)
        self._first, graphs.before = [], fold
        return h

    def _products(self, x: Any, units: list[Unit], region: Region) -> list[Pointer]:
        """x times each unit of the region's last matrix."""
        if isinstance(region, Experts):
            nodes, gated = x
            return list(nodes.products(gated, units))
        line, mul_mat = 4 * sum(unit.width for unit in units), self.ggml.mul_mat
        return [
            mul_mat(self.context, unit.tensor, self._piece(x, unit, line) if len(units) > 1 else x) for unit in units
        ]

    def _piece(self, x: Pointer, unit: Unit, line: int) -> Pointer:
        """The columns of x that a unit multiplies. Repacked kernels take four rows at a time, with no gaps between."""
        piece = self.ggml.view_2d(self.context, x, unit.width, self.graphs.n_rows, line, 4 * unit.start)
        return self.ggml.cont(self.context, piece) if unit.repacked and self.graphs.n_rows > 1 else piece

    def _by_head(self, heads: Any, region: Attention) -> list[Pointer]:
        """Queries and keys as [head_dim, heads, rows]; values as they are."""
        q, k, v = heads
        ends = ((q, region.heads), (k, region.kv_heads))
        n_rows, dim = self.graphs.n_rows, region.head_dim
        return [*(self.ggml.reshape_3d(self.context, x, dim, n, n_rows) for x, n in ends), v]
