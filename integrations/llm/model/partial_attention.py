"""Attention over a part of the keys, and the exact merge of such parts.

Softmax over keys that lie in several places: each place gives the largest score of a query, the sum of the exponentials
relative to it, and the values weighted by them. Those three are enough to continue with more keys, or to merge places:
nothing is approximated, and all sums are in f32, in the order in which tiles and places are given.

Source: Milakov & Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867; Dao et al.,
FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hostring.integrations.llm.model.attention_kind import FULL, AttentionKind

MAX_SCORES = 1 << 20  # elements of the scores that are held at once, 4 bytes each; a tile has at least one key


class Partial(NamedTuple):
    """What one place knows of each query, all f32.

    Attributes:
        peak: the largest score, shape (heads, queries); -inf where a query sees no key here.
        total: sum of exp(score - peak), same shape; 0 there.
        weighted: sum of exp(score - peak) * value, shape (heads, queries, head_dim); 0 there.
    """

    peak: Tensor
    total: Tensor
    weighted: Tensor

    def packed(self) -> Tensor:
        """One tensor that travels, shape (heads, queries, head_dim + 2)."""
        return torch.cat((self.weighted, self.peak[..., None], self.total[..., None]), -1)

    @staticmethod
    def unpacked(packed: Tensor) -> Partial:
        """From what `packed` gave; any further dimensions come first."""
        return Partial(packed[..., -2], packed[..., -1], packed[..., :-2])


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, start: int, positions: Tensor, kind: AttentionKind = FULL, tile: int | None = None
) -> Partial:
    """Attention of queries at positions start … over the keys that are here, tile by tile.

    Args:
        q: shape (heads, queries, head_dim).
        k: shape (kv_heads, keys, head_dim), where each KV head serves heads / kv_heads query heads in turn; v alike.
        start: position of the first query; the others follow.
        positions: of the keys, ascending, shape (keys,).
        kind: which of them a query sees, and how they are scored.
        tile: keys whose scores are held at once; as many as `MAX_SCORES` allows when not given.
    """
    heads, queries, head_dim = q.shape
    kv_heads = k.shape[0]
    grouped = q.float().reshape(kv_heads, -1, head_dim)  # (kv_heads, group * queries, head_dim)
    peak = grouped.new_full(grouped.shape[:2], -torch.inf)
    total, weighted = torch.zeros_like(peak), torch.zeros_like(grouped)
    seen_by = torch.arange(start, start + queries, device=q.device)
    for keys in _tiles(positions, start, queries, kind, tile or max(1, MAX_SCORES // (heads * queries))):
        scores = kind.capped(torch.bmm(grouped, k[:, keys].float().mT) * kind.scale_of(head_dim))
        visible = kind.visible(seen_by, positions[keys])
        if not visible.all():
            by_query = scores.view(kv_heads, -1, queries, visible.shape[1])
            by_query.masked_fill_(~visible, -torch.inf)
        higher = torch.maximum(peak, scores.amax(-1))
        base = _finite(higher)
        weights, kept = scores.sub_(base[..., None]).exp_(), torch.exp(peak - base)
        total = total * kept + weights.sum(-1)
        weighted = weighted * kept[..., None] + torch.bmm(weights, v[:, keys].float())
        peak = higher
    return Partial(peak.view(heads, queries), total.view(heads, queries), weighted.view(heads, queries, head_dim))


def merged(parts: Partial, sinks: Tensor | None = None) -> Tensor:
    """The attention output of places that hold disjoint keys, folded in the order in which they stand.

    Args:
        parts: of all places, stacked along a first dimension.
        sinks: attention sinks: one more logit for each head, shape (heads,), of no position. It adds to the
            normalisation once, after all places.

    Returns:
        shape (heads, queries, head_dim), f32. A query that sees no key anywhere gives zeros.
    """
    highest = parts.peak.amax(0)
    if sinks is not None:
        highest = torch.maximum(highest, sinks.float()[:, None])
    base = _finite(highest)
    total, weighted = torch.zeros_like(base), torch.zeros_like(parts.weighted[0])
    for peak, own, values in zip(*parts, strict=True):
        kept = torch.exp(peak - base)
        total = total + kept * own
        weighted = weighted + kept[..., None] * values
    if sinks is not None:
        total = total + torch.exp(sinks.float()[:, None] - base)
    return torch.where(total[..., None] > 0, weighted / total[..., None], 0.0)


def _tiles(positions: Tensor, start: int, queries: int, kind: AttentionKind, tile: int) -> Iterator[slice]:
    """The keys that any of the queries sees, cut into tiles."""
    bounds = torch.tensor([kind.first_visible(start), start + queries], device=positions.device)
    first, end = torch.searchsorted(positions, bounds).tolist()
    for begin in range(first, end, tile):
        yield slice(begin, min(begin + tile, end))


def _finite(peak: Tensor) -> Tensor:
    """`peak`, but 0 where there is no key: -inf minus -inf would be no number."""
    return torch.where(torch.isneginf(peak), 0.0, peak)
