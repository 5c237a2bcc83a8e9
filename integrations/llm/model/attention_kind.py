"""Which positions a query sees, and what is done to its scores before they are weighed. Layers may differ in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # plans read which layers there are without torch
    from torch import Tensor


@dataclass(frozen=True)
class AttentionKind:
    """Attention over the positions up to the query's own; options narrow it.

    Attributes:
        window: a query sees its own position and the `window` - 1 before it; 0 for no such limit.
        chunk: a query sees the positions of its own run of `chunk` positions only; 0 for no such limit.
        softcap: scores become softcap * tanh(score / softcap); 0.0 leaves them as they are.
        scale: factor of the scores; 0.0 stands for 1 / √head_dim.
    """

    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    scale: float = 0.0

    def scale_of(self, head_dim: int) -> float:
        """The factor of the scores."""
        return self.scale or head_dim**-0.5

    def first_visible(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        by_window = position - self.window + 1 if self.window else 0
        by_chunk = position // self.chunk * self.chunk if self.chunk else 0
        return max(0, by_window, by_chunk)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys each query sees, shape (queries, keys). Both are given by their positions."""
        rows, columns = queries[:, None], keys[None]
        seen = columns <= rows
        if self.window:
            seen &= columns > rows - self.window
        if self.chunk:
            chunks = (at.div(self.chunk, rounding_mode="floor") for at in (rows, columns))
            seen &= next(chunks) == next(chunks)
        return seen

    def capped(self, scores: Tensor) -> Tensor:
        """The scores after the soft-cap."""
        return scores if not self.softcap else (scores / self.softcap).tanh() * self.softcap


FULL: Final = AttentionKind()
"""Causal attention over all positions."""
