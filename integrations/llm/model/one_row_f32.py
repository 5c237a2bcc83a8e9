"""`OneRow` in f32: numpy's small operations, which cost a third of torch's to call.

All layers work in the same few buffers, which numpy and torch share: nothing is allocated but what attention returns.
The matrices are those of the layers, not copies.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hostring.integrations.llm.model.cache import KVSlot
from hostring.integrations.llm.model.qwen import Attention, Decoder, Layer, RMSNorm
from hostring.integrations.llm.model.tensor_parallel import (
    Call,
    ColumnParallelLinear,
    HiddenReducer,
    ParallelHead,
    RowParallelLinear,
)

Array = npt.NDArray[np.float32]


def weight_of_heads(attention: Attention, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
    """The QK-norm's weights for each head, queries before keys, shape (heads + kv_heads, head_dim)."""
    return torch.cat((q_norm.weight.expand(attention.heads, -1), k_norm.weight.expand(attention.kv_heads, -1))).detach()


class _Buffers:
    """What the layers read and write; what a matrix takes or gives has the shape (1, width).

    Attributes:
        h: the residual stream, shape (hidden,).
        x: h after a norm.
        heads: `qkv` by heads, shape (heads + 2 kv_heads, head_dim); `halves` splits each head in two.
        added: the sum over ranks that a sub-layer adds to h, shape (hidden,).
    """

    def __init__(self, layer: Layer, row: Tensor) -> None:
        attention, columns = layer.attention, layer.mlp.columns
        heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
        all_heads = heads + 2 * kv_heads
        self.h, self.x, self.added = np.empty(row.shape[1], np.float32), torch.empty_like(row), row.numpy()[0]

        self.qkv, turned = torch.empty(1, all_heads * head_dim), torch.empty(all_heads, head_dim)
        self.halves: Array = self.qkv.numpy().reshape(all_heads, 2, head_dim // 2)
        self.heads, self.swapped = self.halves.reshape(all_heads, head_dim), self.halves[:, ::-1]
        self.turned, self.across = turned.numpy(), np.empty_like(self.halves)
        self.across_heads = self.across.reshape(all_heads, head_dim)
        self.q, self.kv = turned[:heads].view(1, kv_heads, heads // kv_heads, head_dim), self.turned[heads:]
        self.attended = torch.empty(1, heads * head_dim)
        self.grouped = self.attended.numpy().reshape(self.q.shape)

        self.gate_up, self.gated = torch.empty(1, 2 * columns), torch.empty(1, columns)
        self.gate, up = self.gate_up.split_with_sizes((columns, columns), 1)
        self.activated, self.up, self.product = self.gate.numpy(), up.numpy(), self.gated.numpy()

    def norm(self, norm: RMSNorm) -> Call:
        """A call that writes the norm of h into x: h * (w √n / √(h·h + n ε))."""
        h, x, width, multiply = self.h, self.x.numpy()[0], norm.weight.numel(), np.multiply
        scaled, floor = norm.weight.detach().numpy() * np.float32(width**0.5), norm.eps.item() * width

        def apply() -> None:
            multiply(h, scaled * (float(h.dot(h)) + floor) ** -0.5, out=x)

        return apply

    def head_norm(self, attention: Attention) -> Call | None:
        """A call that applies the QK-norm in place, to queries and keys but not to values."""
        if attention.q_norm is None or attention.k_norm is None:
            return None
        weight, width = weight_of_heads(attention, attention.q_norm, attention.k_norm).numpy(), attention.head_dim
        scaled, floor = weight * np.float32(width**0.5), np.float32(attention.q_norm.eps.item() * width)
        turning, squares, length = (
            self.heads[: len(weight)],
            np.empty_like(weight),
            np.empty((len(weight), 1), np.float32),
        )

        def apply() -> None:
            np.multiply(turning, turning, out=squares)
            np.add.reduce(squares, axis=1, keepdims=True, out=length)
            np.add(length, floor, out=length)
            np.sqrt(length, out=length)
            np.divide(turning, length, out=turning)
            np.multiply(turning, scaled, out=turning)

        return apply

    def attend(self, cos: Array, sin: Array, slot: KVSlot) -> None:
        """From `qkv` to `attended`. cos: shaped as `heads`; sin: as `halves`."""
        np.multiply(self.heads, cos, out=self.turned)
        np.multiply(self.swapped, sin, out=self.across)
        np.add(self.turned, self.across_heads, out=self.turned)
        slot.row.numpy()[...] = self.kv
        self.grouped[...] = F.scaled_dot_product_attention(self.q, slot.keys, slot.values).numpy()

    def activate(self) -> None:
        """From `gate_up` to `gated`."""
        F.silu(self.gate, inplace=True)
        np.multiply(self.activated, self.up, out=self.product)

    def add(self) -> None:
        """Add the sum to h. Products summed directly onto h would lose low bits, because h is larger."""
        np.add(self.h, self.added, out=self.h)


class _Layer:
    """One layer, bound."""

    def __init__(self, layer: Layer, buffers: _Buffers) -> None:
        attention, mlp = layer.attention, layer.mlp
        self.buffers = buffers
        self.input_norm, self.post_norm = buffers.norm(layer.input_norm), buffers.norm(layer.post_norm)
        self.head_norm = buffers.head_norm(attention)
        self.qkv = cast(ColumnParallelLinear, attention.qkv_proj).bind_buffers(buffers.x, buffers.qkv)
        self.o = cast(RowParallelLinear, attention.o_proj).bind_buffers(buffers.attended)
        self.gate_up = cast(ColumnParallelLinear, mlp.gate_up_proj).bind_buffers(buffers.x, buffers.gate_up)
        self.down = cast(RowParallelLinear, mlp.down_proj).bind_buffers(buffers.gated)

    def __call__(self, cos: Array, sin: Array, slot: KVSlot) -> None:
        self.input_norm()
        self.qkv()
        if self.head_norm is not None:
            self.head_norm()
        self.buffers.attend(cos, sin, slot)
        self.o()
        self.buffers.add()
        self.post_norm()
        self.gate_up()
        self.buffers.activate()
        self.down()
        self.buffers.add()


class RowF32:
    """One row through a rank's part of a decoder.

    Args:
        decoder: its layers are parallel ones.
        reducer: the one of its layers.
    """

    def __init__(self, decoder: Decoder, layers: list[Layer], reducer: HiddenReducer) -> None:
        self.buffers = _Buffers(layers[0], reducer.row)
        self.layers = [_Layer(layer, self.buffers) for layer in layers]
        self.norm = self.buffers.norm(decoder.norm)
        head = cast(ParallelHead, decoder.head)
        self.scores = torch.empty(1, head.weight.shape[0])
        self.head = head.bind_buffers(self.buffers.x, self.scores)
        self.stream = torch.from_numpy(self.buffers.h)[None]

    def run_layers(self, h: Tensor, cos: Tensor, sin: Tensor, slots: list[KVSlot]) -> Tensor:
        """The residual stream, shape (1, hidden): the buffer in which the layers add it up."""
        self.buffers.h[...] = h.numpy()[0]
        cosines, sines = cos.numpy(), sin.numpy().reshape(self.buffers.halves.shape)
        for layer, slot in zip(self.layers, slots, strict=True):
            layer(cosines, sines, slot)
        return self.stream

    def logits(self, h: Tensor) -> Tensor:
        """Of what `run_layers` left in the buffer, which is h."""
        self.norm()
        self.head()
        return self.scores.clone()
