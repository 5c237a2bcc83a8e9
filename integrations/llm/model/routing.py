"""Which experts a token uses: one decision in f32, the same on every rank, with ties that go to the lower number.

All ranks have the same bits of the residual stream, but each normalises and multiplies it in its own way: by another
library, on another device. So a rank's own scores decide only where the gap between the last expert that is used and
the first that isn't is larger than any rounding can be. Nearer scores are computed a second time, from the stream, by
single operations that IEEE 754 rounds alike everywhere. That needs no message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hostring.integrations.llm.model.config import Mixture

EPSILON = 2.0**-23  # twice what one rounding to f32 changes at most, relative
MAX_PAIRS = 2048  # of rows and experts whose products are in memory at once


@dataclass(frozen=True)
class Routes:
    """The experts that each row uses.

    Attributes:
        experts: their numbers, rising, shape (rows, used). Sums over them are made in this order.
        weights: theirs, shape (rows, used), f32.
        shared: the weight of the shared expert, shape (rows, 1), f32; None where there is none.
    """

    experts: Tensor
    weights: Tensor
    shared: Tensor | None

    def by_expert(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each expert that is used, rising; the rows that use it; and its weight in each, shape (rows, 1)."""
        rows, slots = torch.where(self.experts >= 0)
        order = torch.sort(self.experts.flatten(), stable=True)
        numbers, counts = torch.unique_consecutive(order.values, return_counts=True)
        for number, at in zip(numbers.tolist(), order.indices.split_with_sizes(counts.tolist()), strict=True):
            yield number, rows[at], self.weights[rows[at], slots[at], None]


class Router(nn.Module):
    """Scores of all experts, and the choice.

    Args:
        hidden_size: of the stream.
        mixture: how many experts there are, and how many of them a row uses.
    """

    def __init__(self, hidden_size: int, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.count, hidden_size))
        self.shared = nn.Parameter(torch.empty(1, hidden_size)) if mixture.shared_columns else None
        self._longest: Tensor | None = None  # of the rows of `weight`

    def forward(self, h: Tensor, x: Tensor, norm: nn.Module) -> Routes:
        """The routes of all rows.

        Args:
            h: the residual stream, shape (..., hidden), f32: the same bits on all ranks.
            x: its norm, the same shape; the last bits may be this rank's own.
            norm: which norm that is.
        """
        h, x = h.flatten(0, -2), x.flatten(0, -2)
        scores = F.linear(x, self.weight)  # (rows, experts)
        experts = self.experts_of(scores, h, x, norm)
        weights = scores.softmax(-1).gather(-1, experts)
        if self.mixture.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.mixture.scale != 1.0:
            weights = weights * self.mixture.scale
        shared = None if self.shared is None else F.linear(x, self.shared).sigmoid()
        return Routes(experts, weights, shared)

    def experts_of(self, scores: Tensor, h: Tensor, x: Tensor, norm: nn.Module) -> Tensor:
        """Numbers of the experts that rows with these scores use, rising, shape (rows, used); see `forward`."""
        ranked = torch.sort(self._sure(scores, h, x, norm), dim=-1, descending=True, stable=True).indices
        return ranked[:, : self.mixture.used].sort(-1).values

    def _sure(self, scores: Tensor, h: Tensor, x: Tensor, norm: nn.Module) -> Tensor:
        """Scores that rank the experts of each row alike on all ranks, as far as the choice goes.

        In a row whose choice rounding might change, experts that are in or out whatever the rounding have infinite
        scores, and only the others are computed again.
        """
        used = self.mixture.used
        if used == self.mixture.count:
            return scores
        doubt, first = self._doubt(x), scores.topk(used + 1, -1).values
        last_in, first_out = first[:, used - 1], first[:, used]
        near = ~(last_in - first_out > doubt)
        if not near.any():
            return scores
        is_in, is_out = scores > (first_out + doubt)[:, None], scores < (last_in - doubt)[:, None]
        rows, experts = torch.where(near[:, None] & ~(is_in | is_out))
        found = torch.where(near[:, None], torch.where(is_in, torch.inf, -torch.inf), scores)
        for start in range(0, len(rows), MAX_PAIRS):
            r, e = rows[start : start + MAX_PAIRS], experts[start : start + MAX_PAIRS]
            found[r, e] = same_scores(h[r], norm, self.weight[e])
        return found

    def _doubt(self, x: Tensor) -> Tensor:
        """How much two scores of a row may differ from rank to rank, shape (rows,)."""
        doubt: Tensor = self.doubt_of_length_1() * torch.linalg.vector_norm(x, dim=-1)
        return doubt

    def doubt_of_length_1(self) -> Tensor:
        """The same for a row of length 1: a sum of n products in any order, of a norm whose n squares were added in any
        order, is off by less than n + 8 roundings of |x| |w|."""
        longest = self._longest
        if longest is None:
            longest = torch.linalg.vector_norm(self.weight, dim=-1).max()
            self._longest = None if self.weight.requires_grad else longest  # which training would change
        return 4 * (self.weight.shape[-1] + 8) * EPSILON * longest


def same_scores(h: Tensor, norm: nn.Module, weight: Tensor) -> Tensor:
    """Scores of experts for rows of the stream, with the same bits on any machine and in any company.

    Args:
        h: a row of the stream for each score, shape (pairs, hidden), f32.
        weight: of an expert for each, the same shape.

    Returns:
        shape (pairs,).
    """
    scale, eps = norm.get_parameter("weight"), norm.get_buffer("eps")
    mean = sum_by_halves(h * h) / h.shape[-1]
    return sum_by_halves(h / torch.sqrt(mean + eps)[:, None] * scale * weight)


def sum_by_halves(terms: Tensor) -> Tensor:
    """The sum along the last dimension: the second half is added to the first until one is left."""
    while (n := terms.shape[-1]) > 1:
        half = n // 2
        pairs = terms[..., :half] + terms[..., half : 2 * half]
        terms = torch.cat((pairs, terms[..., 2 * half :]), -1) if n % 2 else pairs
    return terms[..., 0]
