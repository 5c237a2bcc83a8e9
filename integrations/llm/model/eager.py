"""The operations of a layer by torch, on any number of sequences and rows: computed at once, differentiable,
compilable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hostring.integrations.llm.model.attention import attend
from hostring.integrations.llm.model.cache import Slot
from hostring.integrations.llm.model.experts import Gated, gate_experts, mix
from hostring.integrations.llm.model.regions import Attention, Experts, GatedMlp, Region

Rope = tuple[Tensor, Tensor]


class Eager:
    """See `Operations`. The residual stream and the norms are f32 whatever the weights are.

    Args:
        layer: holds the modules that regions name.
        rope: tables of the new positions.
        slots: the layer's part of the cache; or of several caches, whose sequences follow each other as rows. None
            attends to the new positions alone.
    """

    def __init__(self, layer: nn.Module, rope: Rope, slots: Sequence[Slot] | None) -> None:
        self.layer, self.rope, self.slots = layer, rope, slots

    def norm(self, h: Tensor, region: Region) -> Tensor:
        """Shape (batch, seq, hidden), f32."""
        found: Tensor = getattr(self.layer, region.norm)(h)
        return found

    def project(self, x: Tensor, region: Region) -> Tensor:
        """Shape (batch, seq, outputs), in the dtype of the weights."""
        found: Tensor = getattr(getattr(self.layer, region.side), region.first)(x)
        return found

    def norm_heads(self, heads: Tensor, region: Attention) -> Tensor:
        """Shape (batch, seq, heads + 2 kv_heads, head_dim), f32."""
        side = getattr(self.layer, region.side)
        q, k, v = _by_head(heads, region).float().split_with_sizes((region.heads, region.kv_heads, region.kv_heads), 2)
        return torch.cat((side.q_norm(q), side.k_norm(k), v), 2)

    def norm_across(self, heads: Tensor, x: Tensor, region: Attention) -> Tensor:
        """See `norm_heads`."""
        return norm_across(getattr(self.layer, region.side), heads, x, region)

    def turn(self, heads: Tensor, region: Attention) -> Tensor:
        """Shape (batch, seq, heads + 2 kv_heads, head_dim), rounded to the dtype of the weights."""
        turned = rotate(_by_head(heads, region), self.rope) if region.rotates else _by_head(heads, region)
        dtype: torch.dtype = getattr(getattr(self.layer, region.side), region.first).weight.dtype
        return turned if dtype == torch.float32 else turned.to(dtype)

    def attend(self, heads: Tensor, region: Attention) -> Tensor:
        """Shape (batch, seq, what the last matrix multiplies), in the dtype of the heads."""
        q = heads[:, :, : region.heads]  # (batch, seq, heads, head_dim)
        kv = heads[:, :, region.heads :]  # (batch, seq, 2 kv_heads, head_dim)
        if self.slots is None:
            k, v = kv.transpose(1, 2).chunk(2, 1)
            out = attend(q, k, v, 0, region.kind)
        elif len(self.slots) == 1:
            out = self.slots[0].attend(q, kv, region.kind)
        else:
            lengths = [slot.n_new for slot in self.slots]
            parts = zip(self.slots, q.split_with_sizes(lengths, 1), kv.split_with_sizes(lengths, 1), strict=True)
            out = torch.cat([slot.attend(q, kv, region.kind) for slot, q, kv in parts], 1)
        return out if out.dtype == heads.dtype else out.to(heads.dtype)

    def gate(self, gate_up: Tensor, region: GatedMlp) -> Tensor:
        """Shape (batch, seq, columns), in the dtype of the weights."""
        gate, up = gate_up.split_with_sizes((region.columns, region.columns), -1)
        return F.silu(gate) * up

    def route(self, h: Tensor, x: Tensor, region: Experts) -> Any:
        """`Routes` of all rows."""
        return getattr(self.layer, region.side).router(h, x, getattr(self.layer, region.norm))

    def gate_experts(self, x: Tensor, routes: Any, region: Experts) -> Any:
        """`Gated` of all rows."""
        return gate_experts(getattr(self.layer, region.side), x, routes)

    def add_sum(self, h: Tensor, x: Any, region: Region) -> Tensor:
        """Shape (batch, seq, hidden), f32."""
        if isinstance(x, Gated):
            side = getattr(self.layer, region.side)
            total = mix(side, x)
            summed: Tensor = total if side.reducer is None else side.reducer(total)
            return h + summed
        added: Tensor = getattr(getattr(self.layer, region.side), region.last)(x)
        return h + added.float()


def norm_across(side: Any, heads: Tensor, x: Tensor, region: Attention) -> Tensor:
    """RMSNorm of all queries of a token together, and of all keys. The squares of those that other ranks hold are
    computed here a second time.

    Args:
        side: weights of the region. heads: shape (..., (heads + 2 kv_heads) * head_dim). x: shape (..., hidden).

    Returns:
        shape (..., heads + 2 kv_heads, head_dim), f32.
    """
    widths = [n * region.head_dim for n in (region.heads, region.kv_heads, region.kv_heads)]
    *turning, v = heads.float().split_with_sizes(widths, -1)
    found = []
    for own, norm, others in zip(turning, (side.q_norm, side.k_norm), side.others_proj or (None, None), strict=True):
        squares, width = own.square().sum(-1, keepdim=True), own.shape[-1]
        if others is not None:
            more = others(x).float()
            squares, width = squares + more.square().sum(-1, keepdim=True), width + more.shape[-1]
        found.append(own * (squares / width + norm.eps).rsqrt() * norm.weight)
    return torch.cat((*found, v), -1).view(*heads.shape[:-1], -1, region.head_dim)


def _by_head(heads: Tensor, region: Attention) -> Tensor:
    batch, seq = heads.shape[:2]
    return heads.view(batch, seq, region.heads + 2 * region.kv_heads, region.head_dim)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate heads to their positions, in f32. x: (batch, seq, heads, head_dim)."""
    swapped = x.view(*x.shape[:-1], 2, x.shape[-1] // 2).flip(-2).view(x.shape)
    return torch.addcmul(x * rope[0], swapped, rope[1])
