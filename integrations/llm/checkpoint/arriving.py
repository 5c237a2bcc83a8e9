"""Checkpoints whose bytes are sent here: loaders say what they are going to read, and what they read now."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hostring.shipping.extents import Extent


class Source(Protocol):
    """What makes bytes of a checkpoint's files present. Files are numbered as GGUF's parts are."""

    def plan(self, extents: Iterable[Extent]) -> None:
        """All of these are going to be read."""

    def read(self, extents: Iterable[Extent]) -> None:
        """These are read now."""


class Whole:
    """The source of files that are here."""

    def plan(self, extents: Iterable[Extent]) -> None:
        pass

    def read(self, extents: Iterable[Extent]) -> None:
        pass


@dataclass(frozen=True)
class ArrivingFiles:
    """Files that are sent here, by path, with their numbers in the source."""

    source: Source
    numbers: dict[Path, int]


_arriving: list[ArrivingFiles] = []


def announce(files: ArrivingFiles) -> None:
    """From now on whoever opens one of these files asks their source for what it reads."""
    _arriving.append(files)


def forget(files: ArrivingFiles) -> None:
    """The files are as whole as they will be."""
    _arriving.remove(files)


def source_of(path: Path) -> Source:
    """Where the bytes of a file come from."""
    return next((files.source for files in _arriving if path.absolute() in files.numbers), Whole())


def number_of(path: Path) -> int:
    """A file's number in its source; 0 for a file that is here."""
    return next((files.numbers[path.absolute()] for files in _arriving if path.absolute() in files.numbers), 0)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file.

    Attributes:
        file: its number in the source. row_nbytes: of one row of the first dimension.
    """

    file: int
    offset: int
    shape: tuple[int, ...]
    nbytes: int

    def extent(self, rows: range, columns: range | None) -> Extent:
        """Some rows, and of a matrix some columns."""
        n_rows = self.shape[0] if self.shape else 1
        row_nbytes = self.nbytes // max(1, n_rows)
        if columns is None or len(self.shape) < 2:
            return Extent.of_matrix(self.file, self.offset, row_nbytes, rows, 0, row_nbytes)
        each = row_nbytes // max(1, math.prod(self.shape[1:]))
        return Extent.of_matrix(self.file, self.offset, row_nbytes, rows, each * columns.start, each * columns.stop)


@dataclass(frozen=True)
class ArrivingTensor:
    """A slice of safetensors, as `safe_open` gives it, whose bytes are asked for before they are read."""

    tensor: Any
    stored: StoredTensor
    read: Callable[[Iterable[Extent]], None]

    def get_shape(self) -> list[int]:
        return list(self.tensor.get_shape())

    def get_dtype(self) -> str:
        return str(self.tensor.get_dtype())

    def __getitem__(self, index: Any) -> Any:
        shape = self.stored.shape
        slices = [part for part in (index if isinstance(index, tuple) else (index,)) if isinstance(part, slice)]
        rows, columns = ([range(*part.indices(n)) for part, n in zip(slices, shape, strict=False)] + [None, None])[:2]
        self.read([self.stored.extent(rows if rows is not None else range(shape[0] if shape else 1), columns)])
        return self.tensor[index]


def safetensors_lead(file: Path) -> int:
    """How many bytes come before the tensors.

    Raises:
        ValueError: it is no safetensors file.
    """
    with file.open("rb") as opened:
        start = opened.read(8)
    nbytes = 8 + struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 8 < nbytes <= file.stat().st_size:
        raise ValueError(f"{file} is no safetensors file, or is cut off")
    return int(nbytes)


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Where each tensor of a safetensors file lies."""
    lead, number = safetensors_lead(file), number_of(file)
    with file.open("rb") as opened:
        header = json.loads(opened.read(lead)[8:])
    header.pop("__metadata__", None)
    found = {}
    for name, tensor in header.items():
        start, stop = tensor["data_offsets"]
        found[name] = StoredTensor(number, lead + start, tuple(tensor["shape"]), stop - start)
    return found
