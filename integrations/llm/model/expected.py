"""What is expected to be counted, told without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Expected(Protocol):
    """What forward passes over so many positions each, and the choice after the last of them, cost this rank."""

    def collectives(self, passes: Sequence[int]) -> int:
        """How many calls."""

    def nbytes(self, passes: Sequence[int]) -> int:
        """Payload that this rank sends."""
