"""What a program sends: pieces of buffers, in the dtype in which they travel, and the headers before them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from hostring.arrays.casting import cast
from hostring.arrays.dtypes import BFLOAT16, CODES, FLOAT16, Array, DType, carrier
from hostring.engine.binding import ALIGN, Binding, Buffers, Spot
from hostring.engine.frames import EXPECTED_BYTES, HEADER_BYTES, payload_fields, payload_nbytes
from hostring.engine.receiving import Incoming

NARROW: Final = (FLOAT16, BFLOAT16)


class Result:
    """A piece of the result for ranks that will round it to 16 bits: rounded here, once for each dtype and run."""

    __slots__ = ("_at", "_binding", "_rounded", "_seq", "_spot")

    def __init__(self, binding: Binding, spot: Spot, at: int) -> None:
        self._binding, self._spot, self._at = binding, spot, at
        self._seq = -1
        self._rounded: dict[DType, Array] = {}
        binding.results_nbytes = max(binding.results_nbytes, at + Result.nbytes(spot.stop - spot.start))

    @staticmethod
    def nbytes(n_elements: int) -> int:
        """Room for both dtypes."""
        return len(NARROW) * -(-2 * n_elements // ALIGN) * ALIGN

    def rounded(self, dtype: DType, b: Buffers) -> Array:
        if self._seq != self._binding.seq:
            self._seq = self._binding.seq
            self._rounded.clear()
        found = self._rounded.get(dtype)
        if found is None:
            wide, memory = self._spot.array(b), self._binding.results
            assert memory is not None
            at = self._at + NARROW.index(dtype) * Result.nbytes(wide.size) // len(NARROW)
            narrow: Array = np.frombuffer(memory.reserve(self._binding.results_nbytes), dtype, wide.size, at)
            cast(narrow, wide)
            found = self._rounded[dtype] = narrow.view(carrier(dtype))
        return found


class Outgoing:
    """One message to send.

    Attributes:
        origin: the message that it came with, when it is only passed on: its dtype is kept.
        result, asker: for a result that only one rank needs: the result, and the contribution of that rank. Its dtype
        tells
            what that rank will round to.
    """

    __slots__ = ("_binding", "_nbytes", "asker", "elements", "header", "is_raw", "origin", "result", "scales", "spot")

    def __init__(self, binding: Binding, header: bytearray, spot: Spot, is_raw: bool, origin: Incoming | None) -> None:
        self._binding, self.header, self.spot, self.is_raw, self.origin = binding, header, spot, is_raw, origin
        self._nbytes = payload_nbytes(header)
        self.elements = slice(spot.start, spot.stop)
        self.scales: slice | None = None
        self.result: Result | None = None
        self.asker: Incoming | None = None

    @property
    def rounded_to(self) -> DType | None:
        """The 16-bit dtype in which a result is sent, if any."""
        dtype = None if self.asker is None else self.asker.payload_dtype()
        return dtype if dtype in NARROW else None

    @property
    def payload_nbytes(self) -> int:
        if self.origin is not None and self.origin.side is not None:
            return self.origin.payload_nbytes
        return self._nbytes if self.rounded_to is None else (self.spot.stop - self.spot.start) * 2

    @property
    def in_one_piece(self) -> bool:
        """Whether it is the whole of the caller's array, as it is."""
        return self.spot.whole and not self.spot.is_out and self.origin is None and self.result is None

    def buffers(self, b: Buffers) -> tuple[Any, ...]:
        """Header and payload, in the dtype in which they travel now."""
        if self.result is not None and (dtype := self.rounded_to) is not None:
            rounded = self.result.rounded(dtype, b)
            header = self.header[:EXPECTED_BYTES] + payload_fields(CODES[dtype], rounded.nbytes)
            return self._binding.own_header(header), rounded
        origin = self.origin
        if origin is not None and origin.side is not None:
            header = self.header[:EXPECTED_BYTES] + origin.header[EXPECTED_BYTES:]
            return self._binding.own_header(header), origin.side[HEADER_BYTES:]
        if not self.is_raw:
            return self.header, self.spot.buffer(b)
        assert b.raw is not None
        if self.spot.whole:
            return self.header, b.raw
        pieces = self.header, b.raw[self.elements]
        return pieces if self.scales is None else (*pieces, b.raw[self.scales])
