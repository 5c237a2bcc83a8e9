"""Attention of torch over keys and values that are all here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hostring.integrations.llm.model.attention_kind import FULL, AttentionKind


def attend(q: Tensor, k: Tensor, v: Tensor, start: int, kind: AttentionKind = FULL) -> Tensor:
    """Causal attention of queries at positions start … over keys at positions 0 …

    Args:
        q: shape (batch, queries, heads, head_dim).
        k: shape (batch, kv_heads, start + queries, head_dim); v alike.
        start: position of the first query.
        kind: which of the positions up to its own a query sees. Scores are not capped here, nor scaled otherwise.

    Returns:
        shape (batch, queries, heads * head_dim), in the dtype of the keys.
    """
    batch, queries, heads, head_dim = q.shape
    if q.dtype != k.dtype:
        q = q.to(k.dtype)
    if (first := kind.first_visible(start)) > 0:
        k, v = k[:, :, first:], v[:, :, first:]
    if queries == 1:  # the heads of a group see the same keys, so they can be the query rows of their KV head
        grouped = q.view(batch, k.shape[1], heads // k.shape[1], head_dim)
        return F.scaled_dot_product_attention(grouped, k, v).reshape(batch, 1, heads * head_dim)
    q = q.transpose(1, 2)  # (batch, heads, queries, head_dim)
    if start == 0 and kind.first_visible(queries - 1) == 0:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        rows = torch.arange(start, start + queries, device=q.device)
        mask = kind.visible(rows, torch.arange(first, start + queries, device=q.device))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).reshape(batch, queries, heads * head_dim)
