"""One token of one sequence through a decoder: the arithmetic of `Decoder.forward`, with everything bound in advance.

At one row the matrices are bound by memory, and the small operations between them by the cost of a call, which caches
filled with weights make two to three times dearer than a benchmark of the call alone shows. `Decoder.forward` makes
about 60 calls per layer; this makes half as many, without module dispatch. In f32, most of them are numpy's instead
(`one_row_f32.py`): cheaper to call, but slow with f16, and without bf16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hostring.integrations.llm.model.cache import KVCache, KVSlot
from hostring.integrations.llm.model.one_row_f32 import RowF32, weight_of_heads
from hostring.integrations.llm.model.qwen import Attention, Decoder, Layer, RMSNorm
from hostring.integrations.llm.model.tensor_parallel import RowParallelLinear, Rows


def bound(module: nn.Module) -> Rows:
    """A call that multiplies one row: the one that the module binds, else its `forward`."""
    bind: Callable[[], Rows] | None = getattr(module, "bind_row", None)
    return module.forward if bind is None else bind()


def norm_of_row(norm: RMSNorm) -> Rows:
    """RMSNorm of one row, shape (1, width), in four calls: x * (w √n / hypot(|x|, √(n ε)))."""
    width = norm.weight.numel()
    scaled = norm.weight.detach() * width**0.5
    floor = (norm.eps * width).sqrt()
    length, hypot, div = torch.linalg.vector_norm, torch.hypot, torch.div

    def apply(x: Tensor) -> Tensor:
        return x * div(scaled, hypot(length(x), floor))

    return apply


def norm_of_heads(attention: Attention) -> Rows | None:
    """QK-norm of one row's heads, shape (heads + 2 kv_heads, head_dim): queries and keys; values stay."""
    if attention.q_norm is None or attention.k_norm is None:
        return None
    q_norm, kv_heads = attention.q_norm, attention.kv_heads
    weight = weight_of_heads(attention, q_norm, attention.k_norm)
    eps, inverse_width, turning = q_norm.eps, q_norm.inverse_width, attention.heads + kv_heads

    def apply(x: Tensor) -> Tensor:
        turned, values = x.split_with_sizes((turning, kv_heads))
        mean_eps = torch.addcmul(eps, turned.square().sum(-1, True), inverse_width)
        return torch.cat((turned * mean_eps.rsqrt() * weight, values))

    return apply


class _LayerRow:
    """One layer, bound."""

    def __init__(self, layer: Layer) -> None:
        attention, mlp = layer.attention, layer.mlp
        self.input_norm, self.post_norm = norm_of_row(layer.input_norm), norm_of_row(layer.post_norm)
        self.head_norm = norm_of_heads(attention)
        self.qkv, self.o = bound(attention.qkv_proj), bound(attention.o_proj)
        self.gate_up, self.down = bound(mlp.gate_up_proj), bound(mlp.down_proj)
        self.heads_shape = (attention.heads + 2 * attention.kv_heads, attention.head_dim)
        self.swap_shape = (attention.heads + 2 * attention.kv_heads, 2, attention.head_dim // 2)
        self.cut = (attention.heads, 2 * attention.kv_heads)
        self.grouped = (1, attention.kv_heads, attention.heads // attention.kv_heads, attention.head_dim)
        self.row = (1, attention.heads * attention.head_dim)
        self.columns = (mlp.columns, mlp.columns)

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, slot: KVSlot) -> Tensor:
        """h: the residual stream, shape (1, hidden), f32."""
        qkv = self.qkv(self.input_norm(h))
        dtype = qkv.dtype
        if dtype != torch.float32:
            qkv = qkv.float()
        heads = qkv.view(self.heads_shape)
        if self.head_norm is not None:
            heads = self.head_norm(heads)
        turned = torch.addcmul(heads * cos, heads.view(self.swap_shape).flip(1).view(self.heads_shape), sin)
        if dtype != torch.float32:
            turned = turned.to(dtype).float()
        q, kv = turned.split_with_sizes(self.cut)
        slot.row.copy_(kv)
        out = F.scaled_dot_product_attention(q.view(self.grouped), slot.keys, slot.values)
        h = h + self.o(out.view(self.row))
        gate, up = self.gate_up(self.post_norm(h)).split_with_sizes(self.columns, 1)
        return h + self.down(F.silu(gate) * up)


class _Row:
    """All layers, bound, in any dtype."""

    def __init__(self, decoder: Decoder, layers: list[Layer]) -> None:
        self.layers = [_LayerRow(layer) for layer in layers]
        self.norm = norm_of_row(decoder.norm)
        self.head = bound(decoder.head)

    def run_layers(self, h: Tensor, cos: Tensor, sin: Tensor, slots: list[KVSlot]) -> Tensor:
        for layer, slot in zip(self.layers, slots, strict=True):
            h = layer(h, cos, sin, slot)
        return h

    def logits(self, h: Tensor) -> Tensor:
        return self.head(self.norm(h)).float()


class OneRow:
    """`Decoder.forward(token, cache, last_only=True)` for one token of one sequence.

    Built once the weights are final and torch's number of threads is set: what it binds is not looked up again.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        layers = [layer for layer in decoder.layers if isinstance(layer, Layer)]
        o_proj = layers[0].attention.o_proj
        self.row: _Row | RowF32
        if isinstance(o_proj, RowParallelLinear) and o_proj.dtype == torch.float32:
            self.row = RowF32(decoder, layers, o_proj.reducer)
        else:
            self.row = _Row(decoder, layers)

    def __call__(self, token: Tensor, cache: KVCache) -> Tensor:
        """Logits of the next token, f32. token: (1, 1). Returns shape (1, local vocabulary)."""
        return self.logits(self.run_layers(self.decoder.embed(token), cache))

    def run_layers(self, h: Tensor, cache: KVCache) -> Tensor:
        """The residual stream after all layers, shape (1, hidden), valid until the next call. h: (1, 1, hidden),
        f32."""
        cos, sin = self.decoder.rotary.at(cache.length, 1)
        return self.row.run_layers(h[0], cos[0], sin[0], cache.extend(1))  # cos and sin: (heads + 2 kv_heads, head_dim)

    def logits(self, h: Tensor) -> Tensor:
        """From what `run_layers` returned to logits, shape (1, local vocabulary)."""
        return self.row.logits(h)
