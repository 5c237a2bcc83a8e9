"""What the ranks of the soak tell the parent: one row of numbers each, in shared memory."""

from __future__ import annotations

import mmap
import struct

FIELDS = ("operations", "wrong", "rebuilds", "epoch", "rss", "fds_warm", "fds", "beat")
_ROW = struct.Struct(f"<{len(FIELDS)}q")
_STOP = 0  # the first byte of the board


def size_of(ranks: int) -> int:
    """Bytes of the file that holds it."""
    return 64 + ranks * _ROW.size


class Board:
    """The rows, and whether all are to stop."""

    def __init__(self, path: str, ranks: int) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size_of(ranks))

    def read(self, rank: int) -> dict[str, int]:
        return dict(zip(FIELDS, _ROW.unpack_from(self._map, 64 + rank * _ROW.size), strict=True))

    def write(self, rank: int, row: dict[str, int]) -> None:
        _ROW.pack_into(self._map, 64 + rank * _ROW.size, *(row[name] for name in FIELDS))

    @property
    def stop(self) -> bool:
        return self._map[_STOP] != 0

    @stop.setter
    def stop(self, value: bool) -> None:
        self._map[_STOP] = int(value)
