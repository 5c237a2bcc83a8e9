"""Which bytes of a model's files are meant: runs of equal width at equal distances, as a cut through a matrix is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

MAX_PIECE_NBYTES = 4 << 20  # one hash stands for so many bytes at most; what is lost with a connection


@dataclass(frozen=True)
class Extent:
    """`count` runs of `width` bytes in one file. Each begins `stride` bytes after the one before.

    Attributes:
        file: its number in the list of the model's files.
        offset: of the first run.
    """

    file: int
    offset: int
    width: int
    stride: int = 0
    count: int = 1

    @staticmethod
    def of_matrix(file: int, offset: int, row_nbytes: int, rows: range, start: int, stop: int) -> Extent:
        """Bytes `start` to `stop` of some rows of a matrix whose first row begins at `offset`."""
        first, width = offset + rows.start * row_nbytes + start, stop - start
        if width == row_nbytes or len(rows) == 1:
            return Extent(file, first, width * len(rows))
        return Extent(file, first, width, row_nbytes, len(rows))

    @property
    def nbytes(self) -> int:
        return self.width * self.count

    @property
    def end(self) -> int:
        """Behind the last byte."""
        return self.offset + (self.count - 1) * self.stride + self.width

    def contains(self, other: Extent) -> bool:
        """Whether every byte of `other` is among these."""
        if other.file != self.file:
            return False
        if self.count == 1:
            return self.offset <= other.offset and other.end <= self.end
        if other.offset < self.offset or (other.count > 1 and other.stride != self.stride):
            return False
        row, column = divmod(other.offset - self.offset, self.stride)
        return column + other.width <= self.width and row + other.count <= self.count

    def pieces(self, limit: int | None = None) -> list[Extent]:
        """The same bytes in pieces of at most `limit` bytes; `MAX_PIECE_NBYTES` when not given.

        Runs of one piece lie on a grid of the file, so that other cuts through the same matrix share most pieces.
        """
        limit = limit or MAX_PIECE_NBYTES
        if self.count == 1:
            cuts = range(self.offset - self.offset % limit, self.end, limit)
            found = [(max(cut, self.offset), min(cut + limit, self.end)) for cut in cuts]
            return [Extent(self.file, start, stop - start) for start, stop in found]
        if self.width > limit:
            runs = (Extent(self.file, self.offset + n * self.stride, self.width) for n in range(self.count))
            return [piece for run in runs for piece in run.pieces(limit)]
        each = max(1, limit // self.width)
        return [
            Extent(self.file, self.offset + n * self.stride, self.width, self.stride, min(each, self.count - n))
            for n in range(0, self.count, each)
        ]

    def read(self, data: npt.NDArray[np.uint8]) -> bytes:
        """These bytes of a mapped file, one run after the other."""
        if self.count == 1:
            return data[self.offset : self.end].tobytes()
        shape, strides = (self.count, self.width), (self.stride, 1)
        return np.lib.stride_tricks.as_strided(data[self.offset : self.end], shape, strides).tobytes()

    def write(self, file: BinaryIO, content: bytes) -> None:
        """Put bytes where they belong in an open file."""
        for n in range(self.count):
            file.seek(self.offset + n * self.stride)
            file.write(memoryview(content)[n * self.width : (n + 1) * self.width])


def without_contained(extents: Iterable[Extent], known: Sequence[Extent] = ()) -> list[Extent]:
    """`extents` without those that are empty, or whose bytes are in another one or in one of `known`."""
    found: list[Extent] = []
    for extent in sorted(extents, key=lambda one: -one.nbytes):
        if extent.nbytes and not any(other.contains(extent) for other in (*known, *found)):
            found.append(extent)
    return sorted(found, key=lambda one: (one.file, one.offset))


def map_bytes(path: Path) -> npt.NDArray[np.uint8]:
    """A file, mapped for reading; an empty array for an empty file."""
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
