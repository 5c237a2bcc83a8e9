"""A KV cache that outlives a generation: what a prompt has in common with what it holds is not computed again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hostring import Comm
from hostring.integrations.llm.model.cache import Cache


class PrefixCache:
    """Keys and values on one rank, and the ids that they are of.

    Attributes:
        cache: where they are.
        ids: of the positions that are known to be right. Empty while a generation runs: one that fails leaves nothing.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.ids: list[int] = []

    def forget(self) -> None:
        """Start with nothing, as after a failure of the group, which may have left ranks with different positions."""
        self.ids = []

    def reuse(self, comm: Comm, ids: Sequence[int]) -> list[int]:
        """Keep what all ranks have in common with `ids`; return the rest of them, at least one. A collective."""
        common = 0
        for a, b in zip(self.ids, ids[:-1], strict=False):
            if a != b:
                break
            common += 1
        agreed = int(comm.all_reduce(np.array([common], np.int64), "min")[0])
        self.ids = []
        self.cache.truncate(min(agreed, self.cache.length))
        return list(ids[agreed:])
