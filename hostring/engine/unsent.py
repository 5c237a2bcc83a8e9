"""What a link has not taken yet, of messages on their way to one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hostring.engine.binding import flat


class Unsent:
    """Bytes to be offered to a link again. It is done when `buffers` is empty."""

    __slots__ = ("buffers",)

    def __init__(self, buffers: Iterable[Any], taken: int = 0) -> None:
        self.buffers = [_bytes_of(x) for x in buffers]
        self.drop(taken)

    def drop(self, taken: int) -> None:
        """Forget the first `taken` bytes, which the link has taken."""
        while self.buffers and taken >= len(self.buffers[0]):
            taken -= len(self.buffers.pop(0))
        if taken:
            self.buffers[0] = self.buffers[0][taken:]


def _bytes_of(x: Any) -> memoryview:
    return memoryview(x).cast("B") if isinstance(x, bytes | bytearray | memoryview) else flat(x).view("u1").data
