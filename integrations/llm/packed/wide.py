"""Steps of many rows: matrices are dequantised one after another, and torch multiplies by them.

Products of blocks cost the same for every row. Dequantising costs once, and a row then costs a third of that. The bits
of a row are others than those of the graphs, which round activations to 8 bits, and may depend on how many rows are
beside it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hostring.integrations.llm.checkpoint.gguf_config import INTERLEAVED
from hostring.integrations.llm.model.attention import attend
from hostring.integrations.llm.model.cache import check_fit
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.regions import Attention, Experts, GatedMlp, Region, layers_of
from hostring.integrations.llm.model.rope import rotary_frequencies
from hostring.integrations.llm.packed.decoder import PackedDecoder
from hostring.integrations.llm.packed.dequantise import Dequantiser, floats
from hostring.integrations.llm.packed.last_rows import LastRows
from hostring.integrations.llm.packed.regions import Matrices
from hostring.integrations.llm.packed.step import Rows, Stream, Sums
from hostring.integrations.llm.packed.units import folded

MIN_WIDE_ROWS = 32  # from here on dequantising pays: at 64 rows of SmolLM2, 400 ms instead of 600
MIN_WIDE_CHUNK = 16  # the same for rows of one sequence: attention gains too. A text with its guesses has fewer


def are_many(rows: Rows) -> bool:
    """Whether dequantising pays for these rows."""
    counts = [len(ids) for _, ids in rows]
    return max(counts) >= MIN_WIDE_CHUNK or sum(counts) >= MIN_WIDE_ROWS


class WideSteps:
    """See `Steps`. All ranks of a group take this way, or none.

    Products are made per unit, as in the graphs, so that shapes and sums are those of any other number of ranks.
    """

    def __init__(self, decoder: PackedDecoder, sums: Sums | None) -> None:
        self.decoder, self.sums = decoder, sums
        self.matrices = Dequantiser(decoder.ggml, decoder.threads)
        self._rotation = Rotation(decoder.config)
        self._last_rows = None if decoder.head is None else LastRows(decoder)

    @torch.inference_mode()
    def run(self, rows: Rows, stream: Stream | None = None, every: bool = False) -> Stream:
        """See `Steps.run`."""
        for cache, ids in rows:
            check_fit(cache, len(ids))
        h = self._embedded(rows) if stream is None else torch.from_numpy(stream)
        rope = self._rotation.at([(cache.length, len(ids)) for cache, ids in rows])
        if self.sums is not None:
            self.sums.begin(h.numpy())
        for n, (regions, weights) in enumerate(zip(layers_of(self.decoder.local), self.decoder.layers, strict=True)):
            layer = _WideLayer(self, n, weights, rows, rope)
            for region in regions:
                h = region.run(layer, h)
        if self.sums is not None:
            self.sums.end(h.numpy())
        for cache, ids in rows:
            cache.length += len(ids)
        if self._last_rows is None:
            return h.numpy()
        last = [end - 1 for end in accumulate(len(ids) for _, ids in rows)]
        return self._last_rows.logits(h.numpy() if every else h.numpy()[last])

    def _embedded(self, rows: Rows) -> Tensor:
        ids = np.concatenate([np.asarray(ids, np.int32) for _, ids in rows])
        assert self.decoder.embedding is not None
        return self.matrices.rows(self.decoder.embedding, ids)


class Rotation:
    """Turns queries and keys to their positions, as ggml does: neighbours, or one element of each half of a head."""

    def __init__(self, config: ModelConfig) -> None:
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._frequencies = torch.tensor(frequencies, dtype=torch.float64)
        self._scale = config.rope_scaling.attention_factor

    def at(self, parts: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of (first position, rows) of each sequence, shape (rows, 1, head_dim / 2) each."""
        positions = torch.cat([torch.arange(start, start + n, dtype=torch.float64) for start, n in parts])
        angles = torch.outer(positions, self._frequencies)[:, None]
        return (angles.cos() * self._scale).float(), (angles.sin() * self._scale).float()


class _WideLayer:
    """See `Operations`. h and x are shaped (rows, width). Queries, keys and values are passed on as a list of three,
    gate and up as one of two."""

    def __init__(
        self, steps: WideSteps, number: int, weights: dict[str, Matrices], rows: Rows, rope: tuple[Tensor, Tensor]
    ) -> None:
        self._config, self._folds = steps.decoder.config, steps.decoder.folds
        self._matrices, self._sums = steps.matrices, steps.sums
        self._number, self._weights, self._rows, self._rope = number, weights, rows, rope

    def norm(self, h: Any, region: Region) -> Any:
        weight = floats(self._weights[region.side].norm)
        return F.rms_norm(h, weight.shape, weight, self._config.rms_norm_eps)

    def project(self, x: Any, region: Region) -> Any:
        w = self._weights[region.side]
        widths = [unit.width for unit in w.last]
        found = []
        for tensor, bias in w.first:
            matrix = self._matrices.matrix(tensor)
            units = torch.split(matrix, [width * len(matrix) // sum(widths) for width in widths])
            product = torch.cat([x @ unit.t() for unit in units], 1) if units else x.new_empty(len(x), 0)
            found.append(product if bias is None else product.add_(floats(bias)))
        return found

    def norm_heads(self, heads: Any, region: Attention) -> Any:
        w, (q, k, v) = self._weights[region.side], heads
        eps, norms = self._config.rms_norm_eps, (floats(w.q_norm), floats(w.k_norm))
        shaped = (x.view(len(x), -1, region.head_dim) for x in (q, k))
        return [*(F.rms_norm(x, norm.shape, norm, eps) for x, norm in zip(shaped, norms, strict=True)), v]

    def turn(self, heads: Any, region: Attention) -> Any:
        q, k, v = heads
        return [*(self._turned(x, region.head_dim) for x in (q, k)), v] if region.rotates else heads

    def _turned(self, x: Tensor, head_dim: int) -> Tensor:
        """Shape (rows, heads, head_dim)."""
        (cos, sin), x = self._rope, x.view(len(x), -1, head_dim)
        if self._config.model_type in INTERLEAVED:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def attend(self, heads: Any, region: Attention) -> Any:
        """Every sequence over its own cache, whose keys and values are float16."""
        q, k, v = (x.reshape(len(x), -1) for x in heads)
        found, first = [], 0
        for cache, ids in self._rows:
            start, stop, rows = cache.length, cache.length + len(ids), slice(first, first + len(ids))
            halves = torch.from_numpy(cache.kv[self._number, :, :stop])
            halves[0, start:].copy_(k[rows])
            halves[1, start:].copy_(v[rows])
            keys, values = halves.float().view(2, 1, stop, region.kv_heads, region.head_dim).transpose(2, 3)
            asked = q[rows].view(1, len(ids), region.heads, region.head_dim)
            found.append(attend(asked, keys, values, start)[0])
            first += len(ids)
        return found[0] if len(found) == 1 else torch.cat(found)

    def gate(self, gate_up: Any, region: GatedMlp) -> Any:
        gate, up = gate_up
        return F.silu(gate, inplace=True).mul_(up)

    def norm_across(self, heads: Any, x: Any, region: Attention) -> Any:
        raise NotImplementedError("such heads are refused before weights are read")

    def route(self, h: Any, x: Any, region: Experts) -> Any:
        raise NotImplementedError("experts are refused before weights are read")

    def gate_experts(self, x: Any, routes: Any, region: Experts) -> Any:
        raise NotImplementedError("experts are refused before weights are read")

    def add_sum(self, h: Any, x: Any, region: Region) -> Any:
        """See `LayerGraphs.add_sum`."""
        w, fold = self._weights[region.side], self._folds[region.side]
        products = [
            x[:, unit.start : unit.start + unit.width] @ self._matrices.matrix(unit.tensor).t() for unit in w.last
        ]
        if w.last_bias is not None:  # on the rank that holds the first unit, whose product it joins
            products[0].add_(floats(w.last_bias))
        slots = np.full((fold.n_slots, *h.shape), -0.0, np.float32)  # which changes no number and no zero
        for slot, tree in fold.brings:
            slots[slot] = folded(tree, [product.numpy() for product in products])
        if self._sums is not None:
            self._sums.reduce(slots, fold.completes)
        return h + torch.from_numpy(folded(fold.completes, slots))
