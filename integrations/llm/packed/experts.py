"""The experts of a layer as nodes of ggml graphs: the graph before ends with the scores of all experts, Python decides
as on every other rank, and the next graph multiplies by the experts that were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from hostring.integrations.llm.model.config import Mixture
from hostring.integrations.llm.model.routing import Router
from hostring.integrations.llm.packed.library import Pointer
from hostring.integrations.llm.packed.memory import F32, I32, Arena
from hostring.integrations.llm.packed.weights import Unit


@dataclass
class ExpertMatrices:
    """What a layer with experts has beside a region's matrices, which hold all its experts, [columns, rows, experts].

    Attributes:
        router: chooses experts. norm: of the stream, as the router computes it where scores are near.
        scores: what gives them, [hidden, experts]. shared_score: the same of the shared expert, [hidden, 1].
        shared_first, shared_last: gate and up, and the units, of the expert that every token uses; empty where there is
            none here.
    """

    router: Router
    norm: nn.Module
    scores: Pointer
    shared_score: Pointer | None
    shared_first: list[Pointer]
    shared_last: list[Unit]


class RoutedRows:
    """What a choice reads and writes in a step, as arrays and as tensors of its graphs.

    Attributes:
        x: the norm of the stream, [hidden, rows]. experts: those of each row, [used, rows], and their weights,
            [1, used, rows]. shared: the weight of the shared expert, [1, 1, rows].
    """

    def __init__(self, arena: Arena, context: Pointer, stream: npt.NDArray[np.float32], mixture: Mixture) -> None:
        (n_rows, hidden), used, new = stream.shape, mixture.used, arena.ggml
        self._arena, self._mixture = arena, mixture
        self._stream, self._normed = stream, arena.array(stream.shape)
        self._scores, self._shared_score = arena.array((n_rows, mixture.count)), arena.array((n_rows, 1))
        self._experts = arena.array((n_rows, used), np.int32)
        self._weights, self._shared = arena.array((n_rows, used)), arena.array((n_rows, 1))
        self.n_rows, self.hidden, self.used = n_rows, hidden, used
        self._rows = np.arange(n_rows)[:, None]
        self.x = arena.place(new.new_tensor_2d(context, F32, hidden, n_rows), self._normed)
        self.experts = arena.place(new.new_tensor_2d(context, I32, used, n_rows), self._experts)
        self.weights = arena.place(new.new_tensor_3d(context, F32, 1, used, n_rows), self._weights)
        self.shared = arena.place(new.new_tensor_3d(context, F32, 1, 1, n_rows), self._shared)

    def scored(self, context: Pointer, x: Pointer, weights: ExpertMatrices) -> list[Pointer]:
        """What the graph before a choice computes. x: the norm of the stream."""
        place, mul_mat = self._arena.place, self._arena.ggml.mul_mat
        found = [place(x, self._normed), place(mul_mat(context, weights.scores, x), self._scores)]
        if weights.shared_score is not None:
            found.append(place(mul_mat(context, weights.shared_score, x), self._shared_score))
        return found

    def choose(self, weights: ExpertMatrices) -> None:
        """Choose the experts of every row of this step, each row for itself."""
        scores, mixture, x = self._scores, self._mixture, self._normed
        lengths = np.sqrt(np.einsum("ij,ij->i", x, x))
        experts = weights.router.experts_of(scores, lengths, self._stream.__getitem__, weights.norm)
        chances = np.exp(scores - scores.max(1, keepdims=True))
        found = chances[self._rows, experts] / chances.sum(1, keepdims=True)
        if mixture.normalised:
            found /= found.sum(1, keepdims=True)
        self._experts[:], self._weights[:] = experts, found * np.float32(mixture.scale)
        if weights.shared_score is not None:
            self._shared[:] = 1 / (1 + np.exp(-self._shared_score))


class ExpertNodes:
    """Adds the nodes of a layer's experts. Only products of experts that a row uses are made."""

    def __init__(self, ggml: Any, context: Pointer, routed: RoutedRows, matrices: ExpertMatrices) -> None:
        self._ggml, self._context, self._routed, self._matrices = ggml, context, routed, matrices

    def gated(self, first: Sequence[Pointer]) -> list[Pointer]:
        """silu(gate) * up: of the experts of each row, [columns, used, rows], and of the shared one, [columns, rows].

        first: gate and up of all experts.
        """
        g, ctx, routed = self._ggml, self._context, self._routed
        x = g.reshape_3d(ctx, routed.x, routed.hidden, 1, routed.n_rows)
        found = [g.swiglu_split(ctx, *(g.mul_mat_id(ctx, matrices, x, routed.experts) for matrices in first))]
        if shared := self._matrices.shared_first:
            found.append(g.swiglu_split(ctx, *(g.mul_mat(ctx, matrix, routed.x) for matrix in shared)))
        return found

    def products(self, gated: Sequence[Pointer], last: Sequence[Unit]) -> list[Pointer]:
        """The weighted sum over the experts of each row, in the order of its slots, for each unit: [hidden, 1, rows].

        last: the units of all experts.
        """
        g, ctx, routed, shared_units = self._ggml, self._context, self._routed, self._matrices.shared_last
        line, shared_line = (sum(unit.width for unit in units) for units in (last, shared_units))
        found = []
        for n, unit in enumerate(last):
            piece = self._piece(gated[0], unit, line)
            total = self._weighted(g.mul_mat_id(ctx, unit.tensor, piece, routed.experts), routed.weights, routed.used)
            if shared_units:
                piece = self._shared_piece(gated[1], shared_units[n], shared_line)
                shared = self._weighted(g.mul_mat(ctx, shared_units[n].tensor, piece), routed.shared, 1)
                total = g.add(ctx, total, shared)
            found.append(total)
        return found

    def _piece(self, x: Pointer, unit: Unit, line: int) -> Pointer:
        """The columns of x that a unit of the experts multiplies, [width, used, rows]."""
        if unit.width == line:
            return x
        used, n_rows = self._routed.used, self._routed.n_rows
        return self._ggml.view_3d(self._context, x, unit.width, used, n_rows, 4 * line, 4 * line * used, 4 * unit.start)

    def _shared_piece(self, x: Pointer, unit: Unit, line: int) -> Pointer:
        """The same of the shared expert, [width, rows]; see `LayerGraphs` for repacked units."""
        if unit.width == line:
            return x
        g, ctx, n_rows = self._ggml, self._context, self._routed.n_rows
        piece = g.view_2d(ctx, x, unit.width, n_rows, 4 * line, 4 * unit.start)
        return g.cont(ctx, piece) if unit.repacked and n_rows > 1 else piece

    def _weighted(self, products: Pointer, weights: Pointer, used: int) -> Pointer:
        """The sum over `used` of products, [hidden, used, rows], each times its weight, [1, used, rows]; [hidden, 1,
        rows].

        An outer product with a row of one element adds terms one after another; a product by broadcasting would take
        the time of a call for each element.
        """
        g, ctx, routed = self._ggml, self._context, self._routed
        products = g.reshape_3d(ctx, products, routed.hidden, used, routed.n_rows)
        return g.out_prod(ctx, products, weights)
