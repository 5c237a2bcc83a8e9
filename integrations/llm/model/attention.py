"""Attention of torch over keys and values that are all here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal attention of queries at positions start … over keys at positions 0 …

    Args:
        q: shape (batch, queries, heads, head_dim).
        k: shape (batch, kv_heads, start + queries, head_dim); v alike.
        start: position of the first query.

    Returns:
        shape (batch, queries, heads * head_dim), in the dtype of the keys.
    """
    batch, queries, heads, head_dim = q.shape
    if q.dtype != k.dtype:
        q = q.to(k.dtype)
    if queries == 1:  # the heads of a group see the same keys, so they can be the query rows of their KV head
        grouped = q.view(batch, k.shape[1], heads // k.shape[1], head_dim)
        return F.scaled_dot_product_attention(grouped, k, v).reshape(batch, 1, heads * head_dim)
    q = q.transpose(1, 2)  # (batch, heads, queries, head_dim)
    if start == 0:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        mask = torch.ones(queries, start + queries, dtype=torch.bool, device=q.device).tril(start)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).reshape(batch, queries, heads * head_dim)
