"""A sequence's keys and values on one of two ranks, of which one may lack what the other decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class HandedCache:
    """See `Cache`.

    Attributes:
        held: what is here. length: positions of the sequence. max_seq: how many fit.
        missing: ids of the positions that are not here: all from `held.length` on.
    """

    held: Any
    length: int = field(default=0, init=False)
    max_seq: int = field(init=False)
    missing: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.max_seq = self.held.max_seq

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return int(self.held.nbytes)

    def truncate(self, length: int) -> None:
        """See `Cache`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the KV cache holds {self.length} positions; it can't be cut to {length}")
        self.held.truncate(min(length, self.held.length))
        self.length, self.missing = length, self.missing[: length - self.held.length]
