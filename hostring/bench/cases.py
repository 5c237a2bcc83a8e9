"""The collectives to measure: what each rank brings and must get, and how many bytes nccl-tests counts as moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hostring.bench.truth import BLOCK, Array, contribution, even, folded, rounded

BUS_FACTORS: Final[dict[str, Callable[[int], float]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
    "barrier": lambda n: 1.0,
}
"""busbw = algbw times this, as nccl-tests' PERFORMANCE.md derives it."""

COLLECTIVES: Final = tuple(BUS_FACTORS)
ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")
REDUCING: Final = ("all_reduce", "reduce", "reduce_scatter")
DIVIDED: Final = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")


@dataclass(frozen=True)
class Case:
    """One collective at one size.

    Attributes:
        nbytes: the size as nccl-tests counts it. This is the buffer of all_reduce, reduce, broadcast and send_recv,
            the input of reduce_scatter, scatter and all_to_all, and the output of all_gather and gather.
    """

    collective: str
    op: str
    dtype: np.dtype[Any]
    n_elements: int
    world_size: int
    order: str

    @property
    def nbytes(self) -> int:
        return self.n_elements * self.dtype.itemsize

    @property
    def brought(self) -> int:
        """Elements that every rank brings. In `scatter` only the root brings any."""
        return self.n_elements // self.world_size if self.collective in ("all_gather", "gather") else self.n_elements

    def algbw(self, seconds: float) -> float:
        """GB/s."""
        return self.nbytes / seconds / 1e9

    def busbw(self, seconds: float) -> float:
        """GB/s."""
        return self.algbw(seconds) * BUS_FACTORS[self.collective](self.world_size)

    def input(self, rank: int, seed: int) -> Array:
        return contribution(rank, seed, self.brought, self.dtype)

    def expected(self, rank: int, root: int, seed: int, wire: str) -> Array | None:
        """What `rank` must get from a group with this wire; None when it gets nothing."""
        n, parts = self.world_size, even(self.n_elements, self.world_size)
        if self.collective == "barrier":
            return None
        if self.collective in REDUCING:
            if self.collective == "reduce" and rank != root:
                return self.input(rank, seed)
            rows = [rounded(self.input(r, seed), wire if n > 1 else "float32") for r in range(n)]
            if self.collective == "reduce_scatter":
                return folded(rows, self.op, self.order, parts)[slice(*parts[rank])]
            in_blocks = wire.startswith("mx") and self.dtype.kind not in "biuc" and self.dtype.itemsize <= 4
            blocks = even(self.n_elements, n, BLOCK if in_blocks else 1)
            if self.collective == "all_reduce" and in_blocks and wire.endswith("-both") and n > 1:
                wide = folded([row.astype(np.float32) for row in rows], self.op, self.order, blocks)
                return rounded(wide, wire).astype(self.dtype)
            return folded(rows, self.op, self.order, blocks)
        if self.collective == "broadcast":
            return self.input(root, seed)
        if self.collective == "send_recv":
            return self.input((rank - 1) % n, seed)
        if self.collective == "scatter":
            return self.input(root, seed)[slice(*parts[rank])]
        if self.collective == "all_to_all":
            return np.concatenate([self.input(r, seed)[slice(*parts[rank])] for r in range(n)])
        return (
            None
            if self.collective == "gather" and rank != root
            else np.concatenate([self.input(r, seed) for r in range(n)])
        )


def case(collective: str, op: str, dtype: np.dtype[Any], nbytes: int, world_size: int, order: str) -> Case:
    """The largest case of at most `nbytes`. It has at least one element, or, when it is divided, one for each rank."""
    unit = world_size if collective in DIVIDED else 1
    n_elements = 0 if collective == "barrier" else max(1, nbytes // (dtype.itemsize * unit)) * unit
    return Case(collective, op if collective in REDUCING else "-", dtype, n_elements, world_size, order)
