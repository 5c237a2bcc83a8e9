"""The header of a GGUF file: metadata and where each tensor lies.

`gguf.GGUFReader` builds an array object per metadata item and takes seconds for a vocabulary of 50 000 tokens; every
rank opens the file, so this reads the same bytes in one pass (30 times faster). Format: ggml docs/gguf.md, versions 2
and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
MAX_DEPTH = 16  # of arrays in arrays


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        shape: row-major, as in numpy.
        kind: element or block format.
        offset: first byte, from the start of the file.
        row_nbytes: bytes of one row of the last dimension.
        part: which file of a model in several, from 0.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    row_nbytes: int
    part: int = 0


class _Cursor:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def take(self, nbytes: int) -> bytes:
        start, self.at = self.at, self.at + nbytes
        if self.at > len(self.data):
            raise ValueError(
                f"{self.path}: the header runs past the end of the file ({len(self.data)} bytes); the file is cut off"
            )
        return self.data[start : self.at]

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8", "replace")

    def many(self, count: int, letter: str) -> tuple[Any, ...]:
        raw = self.take(
            count * struct.calcsize(f"<{letter}")
        )  # first: a count that can't be is refused before it is believed
        return struct.unpack(f"<{count}{letter}", raw)

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            if depth > MAX_DEPTH:
                raise ValueError(f"{self.path}: metadata arrays are nested more than {MAX_DEPTH} deep")
            element, count = self.scalar("<I"), self.scalar("<Q")
            if element in _SCALARS:
                return list(self.many(count, _SCALARS[element][1]))
            return [self.value(element, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: metadata of unknown type {kind} at byte {self.at}")
        return self.scalar(_SCALARS[kind])


def map_file(path: Path) -> mmap.mmap:
    """The file, mapped for reading.

    Raises:
        ValueError: it is empty.
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty (0 bytes); download it again")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata and tensors of a mapped GGUF file.

    Raises:
        ValueError: not a GGUF file, another version, cut off, or a tensor that reaches past the end.
    """
    cursor = _Cursor(data, path)
    if cursor.take(4) != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ValueError(f"{path} is GGUF version {version}; little-endian versions 2 and 3 are supported")
    n_tensors, n_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
    fields = {}
    for _ in range(n_fields):
        key = cursor.text()
        fields[key] = cursor.value(cursor.scalar("<I"))
    described = [_Described.read(cursor) for _ in range(n_tensors)]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{path}: general.alignment is {alignment!r}; expected a number of bytes")
    start = -(-cursor.at // alignment) * alignment
    return fields, {one.name: one.place(path, start, len(data)) for one in described}


@dataclass(frozen=True)
class _Described:
    """A tensor as the header describes it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @staticmethod
    def read(cursor: _Cursor) -> _Described:
        name = cursor.text()
        dims = cursor.many(cursor.scalar("<I"), "Q")
        return _Described(name, tuple(reversed(dims)), cursor.scalar("<I"), cursor.scalar("<Q"))

    def place(self, path: Path, start: int, file_nbytes: int) -> TensorInfo:
        """Where it lies in a file whose tensor data begin at `start`."""
        who = f"{path}: tensor {self.name}"
        if self.kind not in {int(kind) for kind in GGML_QUANT_SIZES}:
            raise ValueError(f"{who} is of format {self.kind}, which is unknown; a newer gguf package may know it")
        kind = GGMLQuantizationType(self.kind)
        if not self.shape:
            raise ValueError(f"{who} has no dimensions")
        block, block_nbytes = GGML_QUANT_SIZES[kind]
        if self.shape[-1] % block:
            raise ValueError(
                f"{who} has rows of {self.shape[-1]} elements, which are not whole {kind.name} blocks of {block}"
            )
        row_nbytes = self.shape[-1] // block * block_nbytes
        offset = start + self.offset
        if offset + math.prod(self.shape[:-1]) * row_nbytes > file_nbytes:
            raise ValueError(f"{who} reaches past the end of the file ({file_nbytes} bytes); the file is cut off")
        return TensorInfo(self.shape, kind, offset, row_nbytes)
