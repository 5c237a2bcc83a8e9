"""What a program sends: pieces of buffers, in the dtype that they travel in, and the headers before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hostring.arrays.casting import cast
from hostring.arrays.dtypes import BFLOAT16, CODES, FLOAT16, Array, DType, carrier
from hostring.engine.frames import EXPECTED_BYTES, HEADER_BYTES, payload_fields, payload_nbytes

if TYPE_CHECKING:
    from hostring.engine.program import Program
    from hostring.engine.receiving import Incoming

ALIGN: Final = 64
NARROW: Final = (FLOAT16, BFLOAT16)


@dataclass
class Buffers:
    """What the caller brings to one run: flat host arrays in the program's (carrier) dtype, and contributions in fewer bits."""

    data: Array
    out: Array
    raw: Array | None = None


class Spot:
    """A piece of a buffer: fixed over scratch, or cut from what the caller brings."""

    __slots__ = ("fixed", "is_out", "start", "stop", "whole")

    def __init__(self, fixed: Array | None, is_out: bool, start: int, stop: int, whole: bool) -> None:
        self.fixed, self.is_out, self.start, self.stop, self.whole = fixed, is_out, start, stop, whole

    def array(self, b: Buffers) -> Array:
        if self.fixed is not None:
            return self.fixed
        base = b.out if self.is_out else b.data
        return base if self.whole else base[self.start : self.stop]

    def buffer(self, b: Buffers) -> Array:
        """The same as something that a socket takes: complex numbers as pairs."""
        array = self.array(b)
        return array.view(array.real.dtype) if array.dtype.kind == "c" else array


class Result:
    """A piece of the result on its way to ranks that will round it to 16 bits: rounded here, once for each dtype and run."""

    __slots__ = ("_at", "_rounded", "_seq", "_spot", "program")

    def __init__(self, program: Program, spot: Spot, at: int) -> None:
        self.program, self._spot, self._at = program, spot, at
        self._seq = -1
        self._rounded: dict[DType, Array] = {}

    @staticmethod
    def nbytes(n_elements: int) -> int:
        """Room for both dtypes."""
        return len(NARROW) * -(-2 * n_elements // ALIGN) * ALIGN

    def rounded(self, dtype: DType, b: Buffers) -> Array:
        if self._seq != self.program.seq:
            self._seq = self.program.seq
            self._rounded.clear()
        found = self._rounded.get(dtype)
        if found is None:
            wide = self._spot.array(b)
            at = self._at + NARROW.index(dtype) * Result.nbytes(wide.size) // len(NARROW)
            narrow: Array = np.frombuffer(self.program.results_block(), dtype, wide.size, at)
            cast(narrow, wide)
            found = self._rounded[dtype] = narrow.view(carrier(dtype))
        return found


class Message:
    """One message to send.

    Attributes:
        origin: where it came from, when it is only passed on: another rank's dtype is kept.
        elements, scales: where a raw contribution lies in what the caller brings; scales only where it consists of blocks.
        result, asker: when it is a result for one rank, and that rank's contribution, whose dtype says what it will round to.
    """

    __slots__ = ("asker", "elements", "header", "is_raw", "origin", "result", "scales", "spot")

    def __init__(self, header: bytearray, spot: Spot, is_raw: bool, origin: Incoming | None) -> None:
        self.header, self.spot, self.is_raw, self.origin = header, spot, is_raw, origin
        self.elements = slice(spot.start, spot.stop)
        self.scales: slice | None = None
        self.result: Result | None = None
        self.asker: Incoming | None = None

    @property
    def rounded_to(self) -> DType | None:
        """The dtype of 16 bits that a result is sent in, if it is."""
        dtype = None if self.asker is None else self.asker.payload_dtype()
        return dtype if dtype in NARROW else None

    @property
    def payload_nbytes(self) -> int:
        if self.origin is not None and self.origin.side is not None:
            return payload_nbytes(self.origin.header)
        return (self.spot.stop - self.spot.start) * 2 if self.rounded_to is not None else payload_nbytes(self.header)

    def buffers(self, b: Buffers) -> tuple[Any, ...]:
        if self.result is not None and (dtype := self.rounded_to) is not None:
            rounded, program = self.result.rounded(dtype, b), self.result.program
            return program.own_header(
                self.header[:EXPECTED_BYTES] + payload_fields(CODES[dtype], rounded.nbytes)
            ), rounded
        if self.origin is not None and self.origin.side is not None:
            return self._passed_on(self.origin), self.origin.side[HEADER_BYTES:]
        if self.is_raw:
            assert b.raw is not None
            if self.spot.whole:
                return self.header, b.raw
            pieces = self.header, b.raw[self.elements]
            return pieces if self.scales is None else (*pieces, b.raw[self.scales])
        return self.header, self.spot.buffer(b)

    def _passed_on(self, origin: Incoming) -> bytearray:
        return origin.program.own_header(self.header[:EXPECTED_BYTES] + origin.header[EXPECTED_BYTES:])
