"""A quantised matrix of safetensors files, of which a rank reads the rectangle that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hostring.integrations.llm.checkpoint.hf_quantisation import QuantisedLayout

_WORD_BITS = 32
_NUMBERS = ("I8", "F8_E4M3")
_SCALES = ("F32", "F16", "BF16")


class QuantisedMatrix:
    """(numbers - zero points) * scales, in f32.

    Args:
        name: of the matrix, for errors.
        layout: how it lies in the files.
        tensors: the slices of safetensors that make it, by the ends of their names.

    Attributes:
        shape: of the matrix.
        bytes_read: of all its tensors, so far.

    Raises:
        ValueError: a tensor is missing, or has another dtype or shape.
    """

    def __init__(self, name: str, layout: QuantisedLayout, tensors: Mapping[str, Any]) -> None:
        self._name, self._layout, self._tensors = name, layout, tensors
        for end in layout.companions():
            if end not in tensors:
                raise ValueError(f"{name} is quantised, and its {end} is missing")
        self.bytes_read = 0
        self._check_dtypes()
        numbers = tuple(tensors[layout.numbers].get_shape())
        self.shape = tuple(tensors["weight_shape"][:].tolist()) if layout.packed_bits else numbers
        if len(self.shape) != 2 or (layout.packed_bits and numbers != (self.shape[0], self._words(self.shape[1]))):
            raise ValueError(f"{name} of shape {self.shape} has numbers of shape {numbers}")
        self._block = (layout.rows or max(1, self.shape[0]), layout.columns or max(1, self.shape[1]))
        blocks = tuple(-(-size // block) for size, block in zip(self.shape, self._block, strict=True))
        scales = tuple(tensors[layout.scale].get_shape())
        if scales != blocks and not (blocks == (1, 1) and scales in ((), (1,))):
            raise ValueError(f"{name} of shape {self.shape} has scales of shape {scales}; expected {blocks}")

    def read(self, rows: range, columns: range) -> Tensor:
        """These rows and columns, f32."""
        if self._layout.packed_bits:
            values = self._unpacked(self._layout.numbers, rows, columns, 1)
        else:
            values = self._part(self._layout.numbers, rows, columns).float()
        if not values.numel():
            return values
        if self._layout.zero_points:
            values -= self._spread(self._zero_points, rows, columns)
        return values * self._spread(self._scales, rows, columns)

    def _check_dtypes(self) -> None:
        accepted = {
            self._layout.numbers: ("I32",) if self._layout.packed_bits else _NUMBERS,
            self._layout.scale: _SCALES,
        }
        for end, dtypes in accepted.items():
            found = self._tensors[end].get_dtype()
            if found not in dtypes:
                raise ValueError(f"{self._name}: its {end} is of dtype {found}; {', '.join(dtypes)} are read")

    def _words(self, n: int) -> int:
        return -(-n * self._layout.packed_bits // _WORD_BITS)

    def _part(self, end: str, rows: range, columns: range) -> Tensor:
        found: Tensor = self._tensors[end][rows.start : rows.stop, columns.start : columns.stop]
        self.bytes_read += found.nbytes
        return found

    def _unpacked(self, end: str, rows: range, columns: range, packed: int) -> Tensor:
        """Numbers of which 32-bit words along the dimension `packed` hold several, the first in the lowest bits."""
        bits = self._layout.packed_bits
        wanted = (rows, columns)[packed]
        per_word = _WORD_BITS // bits
        words = range(wanted.start // per_word, -(-wanted.stop // per_word))
        found = self._part(end, *((rows, words) if packed else (words, columns)))
        shifts = torch.arange(per_word, dtype=torch.int32) * bits
        numbers = (found.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)  # (rows, columns, per_word)
        numbers = numbers.flatten(1) if packed else numbers.transpose(1, 2).flatten(0, 1)
        first = wanted.start - words.start * per_word
        return numbers.narrow(packed, first, len(wanted)).float() - (1 << (bits - 1))

    def _zero_points(self, rows: range, columns: range) -> Tensor:
        end = "weight_zero_point"
        if self._layout.packed_bits:
            return self._unpacked(end, rows, columns, 0)
        return self._part(end, rows, columns).float()

    def _scales(self, rows: range, columns: range) -> Tensor:
        scales = self._tensors[self._layout.scale]
        if len(scales.get_shape()) < 2:  # one for all
            return scales[...].float().reshape(1, 1)  # type: ignore[no-any-return]
        return self._part(self._layout.scale, rows, columns).float()

    def _spread(self, of: Callable[[range, range], Tensor], rows: range, columns: range) -> Tensor:
        """What each block has, for every element of these rows and columns."""
        both = list(zip((rows, columns), self._block, strict=True))
        blocks = [range(wanted.start // size, -(-wanted.stop // size)) for wanted, size in both]
        found = of(*blocks)
        for dim, (wanted, size) in enumerate(both):
            block_of = torch.arange(wanted.start, wanted.stop) // size - blocks[dim].start
            found = found.index_select(dim, block_of)
        return found
