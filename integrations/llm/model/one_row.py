"""One token of one sequence through a rank's part of a decoder, on a CPU, with everything bound in advance.

At one row the matrices are bound by memory, and the small operations between them by the cost of a call, which caches
filled with weights make two to three times dearer than a benchmark of the call alone shows. So every layer becomes a
few calls over fixed buffers, which numpy and torch share: numpy's small operations cost a third of torch's to call.
Nothing is allocated but what attention returns. The matrices are those of the layers, not copies.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hostring.integrations.llm.model.attention_kind import FULL
from hostring.integrations.llm.model.cache import KVCache, KVSlot
from hostring.integrations.llm.model.eager import norm_across
from hostring.integrations.llm.model.one_row_experts import RowExperts, gate_call
from hostring.integrations.llm.model.qwen import Decoder, ExpertsWeights, Layer, RMSNorm
from hostring.integrations.llm.model.regions import Attention, Experts, GatedMlp, Region
from hostring.integrations.llm.model.row_buffers import RowBuffers
from hostring.integrations.llm.model.tensor_parallel import (
    Call,
    ColumnParallelLinear,
    HiddenReducer,
    ParallelHead,
    RowParallelLinear,
)

Array = npt.NDArray[np.float32]


class _Bound:
    """See `Operations`: each notes calls, and returns the buffer in which they leave their result.

    Args:
        layer: whose weights are bound; `number` is its slot.
        calls: where calls are noted.
        reducer: sums over the ranks.
    """

    def __init__(
        self, layer: Layer, number: int, buffers: RowBuffers, calls: list[Call], reducer: HiddenReducer
    ) -> None:
        self.layer, self.number, self.buffers, self.calls, self.reducer = layer, number, buffers, calls, reducer

    def norm(self, h: Tensor, region: Region) -> Tensor:
        self.calls.append(_norm(h, getattr(self.layer, region.norm), self.buffers.x))
        return self.buffers.x

    def project(self, x: Tensor, region: Region) -> Tensor:
        matrix = self._first(region)
        y = self.buffers.of(region.first, matrix.weight.shape[0], matrix.weight.dtype)
        self.calls += matrix.bind(x, y, self.buffers.of("rounded x", x.shape[1], y.dtype))
        return y

    def norm_heads(self, heads: Tensor, region: Attention) -> Tensor:
        heads = self.buffers.widened(heads, self.calls)
        self.calls.append(_norm_of_heads(heads, getattr(self.layer, region.side), region))
        return heads

    def norm_across(self, heads: Tensor, x: Tensor, region: Attention) -> Tensor:
        normed = self.buffers.of("normed across", heads.shape[1])
        side = getattr(self.layer, region.side)

        def apply() -> None:
            normed.copy_(norm_across(side, heads, x, region).flatten(1))

        self.calls.append(apply)
        return normed

    def turn(self, heads: Tensor, region: Attention) -> Tensor:
        heads = turned = self.buffers.widened(heads, self.calls)
        if region.rotates:
            turned = self.buffers.of("turned", heads.shape[1])
            self.calls.append(_turn(heads, turned, *self.buffers.tables, region.head_dim))
        self.buffers.round(turned, self._first(region).weight.dtype, self.calls)
        return turned

    def attend(self, heads: Tensor, region: Attention) -> Tensor:
        attended = self.buffers.of("attended", region.heads * region.head_dim)
        self.calls.append(_attend(heads, attended, self.buffers.slots, self.number, region))
        return attended

    def gate(self, gate_up: Tensor, region: GatedMlp) -> Tensor:
        gated = self.buffers.of("gated", region.columns, gate_up.dtype)
        self.calls.append(gate_call(gate_up, gated))
        return gated

    def route(self, h: Tensor, x: Tensor, region: Experts) -> Any:
        side = cast(ExpertsWeights, getattr(self.layer, region.side))
        experts = RowExperts(side, getattr(self.layer, region.norm), h, x, self.buffers)
        self.calls.append(experts.route)
        return experts

    def gate_experts(self, x: Tensor, routes: Any, region: Experts) -> Any:
        return routes

    def add_sum(self, h: Tensor, x: Any, region: Region) -> Tensor:
        total, added = h.numpy()[0], self.reducer.row.numpy()[0]
        if isinstance(x, RowExperts):
            self.calls.append(partial(x.mix_into, added))
        else:
            matrix = cast(RowParallelLinear, getattr(getattr(self.layer, region.side), region.last))
            self.buffers.round(x, matrix.dtype, self.calls)
            self.calls += matrix.bind(self.buffers.widened(x, self.calls), self.reducer.row)
        # Products summed directly onto h would lose low bits, because h is larger.
        self.calls += [self.reducer.reduce_row, partial(np.add, total, added, out=total)]
        return h

    def _first(self, region: Region) -> ColumnParallelLinear:
        return cast(ColumnParallelLinear, getattr(getattr(self.layer, region.side), region.first))


def _norm(h: Tensor, norm: RMSNorm, x: Tensor) -> Call:
    """A call that writes the norm of h into x: h * (w √n / √(h·h + n ε))."""
    row, out, width, multiply = h.numpy()[0], x.numpy()[0], norm.weight.numel(), np.multiply
    scaled, floor = norm.weight.detach().numpy() * np.float32(width**0.5), norm.eps.item() * width

    def apply() -> None:
        multiply(row, scaled * (float(row.dot(row)) + floor) ** -0.5, out=out)

    return apply


def _norm_of_heads(heads: Tensor, weights: torch.nn.Module, region: Attention) -> Call:
    """A call that normalises queries and keys in place, but not values."""
    norms = cast(list[RMSNorm], [weights.q_norm] * region.heads + [weights.k_norm] * region.kv_heads)
    weight, width = torch.stack([norm.weight.detach() for norm in norms]).numpy(), region.head_dim
    scaled, floor = weight * np.float32(width**0.5), np.float32(norms[0].eps.item() * width)
    turning = heads.numpy().reshape(-1, width)[: len(norms)]
    squares, length = np.empty_like(weight), np.empty((len(weight), 1), np.float32)

    def apply() -> None:
        np.multiply(turning, turning, out=squares)
        np.add.reduce(squares, axis=1, keepdims=True, out=length)
        np.add(length, floor, out=length)
        np.sqrt(length, out=length)
        np.divide(turning, length, out=turning)
        np.multiply(turning, scaled, out=turning)

    return apply


def _turn(heads: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Call:
    """A call that writes heads * cos + swap_halves(heads) * sin into `turned`."""
    halves: Array = heads.numpy().reshape(-1, 2, head_dim // 2)
    swapped, across = halves[:, ::-1], np.empty_like(halves)
    plain, out, across_row = heads.numpy()[0], turned.numpy()[0], across.reshape(-1)
    cosines, sines = cos.numpy()[0], sin.numpy().reshape(halves.shape)

    def apply() -> None:
        np.multiply(plain, cosines, out=out)
        np.multiply(swapped, sines, out=across)
        np.add(out, across_row, out=out)

    return apply


def _attend(heads: Tensor, attended: Tensor, slots: list[KVSlot], number: int, region: Attention) -> Call:
    """A call that writes the new key and value into the layer's slot, and what attention gives into `attended`."""
    by_head = heads.view(-1, region.head_dim)
    q = by_head[: region.heads].view(1, region.kv_heads, region.heads // region.kv_heads, region.head_dim)
    kv, grouped = by_head[region.heads :].numpy(), attended.numpy().reshape(q.shape)

    def apply() -> None:
        slot = slots[number]
        slot.row.numpy()[...] = kv
        keys, values = slot.keys, slot.values
        if region.kind is not FULL and (first := region.kind.first_visible(slot.start)) > 0:
            keys, values = keys[:, :, first:], values[:, :, first:]
        grouped[...] = F.scaled_dot_product_attention(q, keys, values).numpy()

    return apply


class OneRow:
    """`Decoder.forward(token, cache, last_only=True)` for one token of one sequence.

    Built once the weights are final and torch's number of threads is set: what it binds is not looked up again.

    Args:
        decoder: its matrices are parallel ones, on the CPU.
        reducer: the one of its layers.
    """

    def __init__(self, decoder: Decoder, reducer: HiddenReducer) -> None:
        self.decoder = decoder
        rotary = decoder.rotary
        table_width = (rotary.turning + rotary.fixed) * rotary.cos.shape[1]
        self._buffers = buffers = RowBuffers(reducer.row.shape[1], table_width)
        self._layers: list[Call] = []
        h = buffers.h
        for number, layer in enumerate(cast(list[Layer], decoder.layers)):
            ops = _Bound(layer, number, buffers, self._layers, reducer)
            for region in layer.regions:
                h = region.run(ops, h)
        self._stream = h[None]
        self._head: list[Call] = []
        if isinstance(head := decoder.head, ParallelHead):  # a pipeline's earlier stage has none
            self._scores = torch.empty(1, head.weight.shape[0], dtype=head.weight.dtype)
            rounded = buffers.of("rounded x", h.shape[1], head.weight.dtype)
            self._head = [_norm(h, decoder.norm, buffers.x), *head.bind(buffers.x, self._scores, rounded)]

    def __call__(self, token: Tensor, cache: KVCache) -> Tensor:
        """Logits of the next token, f32. token: (1, 1). Returns shape (1, local vocabulary)."""
        return self.logits(self.run_layers(self.decoder.embed(token), cache))

    def run_layers(self, h: Tensor, cache: KVCache) -> Tensor:
        """The residual stream after all layers, shape (1, 1, hidden), valid until the next call. h: the
        same, f32."""
        buffers = self._buffers
        buffers.h.copy_(h[0])
        for own, table in zip(buffers.tables, self.decoder.rotary.at(cache.length, 1), strict=True):
            own.copy_(table.view(1, -1))
        buffers.slots[:] = cache.extend(1)
        for call in self._layers:
            call()
        return self._stream

    def logits(self, h: Tensor) -> Tensor:
        """From what `run_layers` returned to logits, shape (1, local vocabulary)."""
        for call in self._head:
            call()
        return self._scores.to(torch.float32, copy=True)
