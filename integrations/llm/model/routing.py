"""Which experts a token uses: one decision in f32, the same on every rank, with ties that go to the lower number.

All ranks have the same bits of the residual stream, but each normalises and multiplies it in its own way: by another
library, on another device. So a rank's own scores decide only where the gap between the last expert that is used and
the first that isn't is larger than any rounding can be. Nearer scores are computed a second time, from the stream, by
single operations that IEEE 754 rounds alike everywhere. That needs no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hostring.integrations.llm.model.config import Mixture

EPSILON = 2.0**-23  # twice what one rounding to f32 changes at most, relative
Floats: TypeAlias = npt.NDArray[np.float32]


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
        self._longest: float | None = None  # of the rows of `weight`

    def forward(self, h: Tensor, x: Tensor, norm: nn.Module) -> Routes:
        """The routes of all rows.

        Args:
            h: the residual stream, shape (..., hidden), f32: the same bits on all ranks.
            x: its norm, the same shape; the last bits may be this rank's own.
            norm: which norm that is.
        """
        h, x = h.flatten(0, -2), x.flatten(0, -2)
        scores = F.linear(x, self.weight)  # (rows, experts)
        lengths = torch.linalg.vector_norm(x, dim=-1)
        found = self.experts_of(_host(scores), _host(lengths), lambda row: _host(h[row]), norm)
        experts = torch.from_numpy(found).to(scores.device)
        weights = scores.softmax(-1).gather(-1, experts)
        if self.mixture.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.mixture.scale != 1.0:
            weights = weights * self.mixture.scale
        shared = None if self.shared is None else F.linear(x, self.shared).sigmoid()
        return Routes(experts, weights, shared)

    def experts_of(
        self, scores: Floats, lengths: Floats, stream: Callable[[int], Floats], norm: nn.Module
    ) -> npt.NDArray[np.int64]:
        """Numbers of the experts that rows with these scores use, rising, shape (rows, used): the same on all ranks.

        In a row whose choice rounding might change, experts that are in or out whatever the rounding stay so, and only
        the others are computed again.

        Args:
            scores: shape (rows, experts). lengths: of the rows of the norm, which `scores` were made from.
            stream: gives a row of the residual stream, shape (hidden,), where it is needed.
        """
        used = self.mixture.used
        order = (-scores).argsort(axis=1, kind="stable")
        found = order[:, :used]
        if used < self.mixture.count:
            best = np.take_along_axis(scores, order[:, used - 1 : used + 1], 1)
            doubts = self._doubt_of_length_1() * lengths
            for row in np.flatnonzero(~(best[:, 0] - best[:, 1] > doubts)).tolist():
                (last_in, first_out), doubt, own = best[row], doubts[row], scores[row]
                is_in = own > first_out + doubt
                unsure = np.flatnonzero(~(is_in | (own < last_in - doubt)))
                again = same_scores(stream(row), norm, _host(self.weight[torch.from_numpy(unsure)]))
                kept = unsure[(-again).argsort(kind="stable")[: used - int(is_in.sum())]]
                found[row] = np.concatenate((np.flatnonzero(is_in), kept))
        found.sort(axis=1)
        return found

    def _doubt_of_length_1(self) -> float:
        """How much two scores of a row of length 1 may differ from rank to rank: a sum of n products in any order, of a
        norm whose n squares were added in any order, is off by less than n + 8 roundings of |x| |w|."""
        longest = self._longest
        if longest is None:
            longest = float(torch.linalg.vector_norm(self.weight.detach(), dim=-1).max())
            self._longest = None if self.weight.requires_grad else longest  # which training would change
        return 4 * (self.weight.shape[-1] + 8) * EPSILON * longest


def same_scores(h: Floats, norm: nn.Module, weight: Floats) -> Floats:
    """Scores of experts for a row of the stream, with the same bits on any machine and in any company.

    Args:
        h: the row, shape (hidden,).
        weight: of the experts, shape (experts, hidden).

    Returns:
        shape (experts,).
    """
    scale, eps = _host(norm.get_parameter("weight")), _host(norm.get_buffer("eps"))
    mean = sum_by_halves(h * h) / np.float32(len(h))
    return sum_by_halves(h / np.sqrt(mean + eps) * scale * weight)


def sum_by_halves(terms: Floats) -> Floats:
    """The sum along the last dimension: the second half is added to the first until one is left."""
    while (n := terms.shape[-1]) > 1:
        half = n // 2
        pairs = terms[..., :half] + terms[..., half : 2 * half]
        terms = np.concatenate((pairs, terms[..., 2 * half :]), -1) if n % 2 else pairs
    found: Floats = terms[..., 0]
    return found


def _host(values: Tensor) -> Floats:
    found: Floats = values.detach().cpu().numpy()
    return found
