"""MXFP4: blocks of 32 consecutive float32 numbers that share a power of two and keep 4 bits each.

An element is E2M1: a sign, and 0, 0.5, 1, 1.5, 2, 3, 4 or 6. A scale is E8M0: the power of two 2^(byte - 127), and NaN
for the whole block when it is 255. The scale is the largest magnitude's power of two, divided by 4, the largest power
of two that an element can be; what is larger than 6 then becomes 6. A payload of n elements is their codes, two in a
byte with the first in the low half, then one byte per block. The last block may be short.
Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3, which orders the bytes in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hostring.arrays.blocks import largest_of_blocks
from hostring.arrays.dtypes import BLOCK, Array

PIECE_ELEMENTS: Final = 1 << 16  # that one numpy call works on: enough to make its overhead small
_INFINITY: Final = 0x7F800000  # the bits; NaN is above
_MAGNITUDES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES: Final = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # by code
_PAIRS: Final = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)  # by byte, shape (256, 2)
_SCALES: Final = np.arange(256)
with np.errstate(all="ignore"):  # the smallest weight is a subnormal number
    _WEIGHTS: Final = np.ldexp(1.0, _SCALES - 127).astype(np.float32)
    _INVERSE: Final = np.ldexp(1.0, 127 - _SCALES).astype(np.float32)
_WEIGHTS[255] = np.nan
_ONE: Final = 127  # the exponent field of 1.0, the lowest power of two with a bit after the point
# x + 1.5 * 2^(e + 22) has its last bit at 2^(e - 1): the addition rounds to nearest even, and leaves x / 2^(e - 1) in
# the lowest bits.
_MAGIC_STEP, _MAGIC_HALF = 22, 1 << 22


def round_to_blocks(values: Array, payload: Array) -> None:
    """Round `values`, float32, in place to numbers that MXFP4 can hold, and write them as a payload.

    Args:
        payload: uint8, of `nbytes_of(values.size, MXFP4)` bytes.
    """
    elements, scales = _parts(payload, values.size)
    scratch = _Scratch(min(-(-values.size // BLOCK) * BLOCK, PIECE_ELEMENTS))
    for a in range(0, values.size, PIECE_ELEMENTS):
        b = a + PIECE_ELEMENTS
        _round_piece(values[a:b], elements[a // 2 : b // 2], scales[a // BLOCK : b // BLOCK], scratch)


class _Scratch:
    """Memory for one piece. Made once for all pieces: the system takes new memory back and clears it each time."""

    def __init__(self, n_elements: int) -> None:
        self.whole = np.zeros(n_elements, np.float32)
        self.exponents, self.magic, self.codes = (np.empty(n_elements, np.int32) for _ in range(3))
        self.packed = np.empty(n_elements // 2, np.int32)


def _parts(payload: Array, n_elements: int) -> tuple[Array, Array]:
    """The codes and the scales of a payload."""
    n_bytes = -(-n_elements // 2)
    return payload[:n_bytes], payload[n_bytes:]


@np.errstate(all="ignore")
def _round_piece(values: Array, elements: Array, scales: Array, scratch: _Scratch) -> None:
    n_elements, n_whole = values.size, scales.size * BLOCK
    whole, codes, packed = scratch.whole[:n_whole], scratch.codes[:n_whole], scratch.packed[: n_whole // 2]
    np.abs(values, out=whole[:n_elements])
    whole[n_elements:] = 0
    largest = largest_of_blocks(whole.view(np.int32))
    scales[...] = np.maximum((largest >> 23) - 2, 0)
    spoilt = largest >= _INFINITY
    scales[spoilt] = 255
    blocks = whole.reshape(-1, BLOCK)
    blocks *= _INVERSE.take(scales)[:, None]
    blocks[spoilt] = 0
    _codes(whole, scratch)
    signs = np.right_shift(values.view(np.int32), 28, out=scratch.exponents[:n_elements])
    signs &= 8
    codes[:n_elements] |= signs
    codes.reshape(-1, BLOCK)[spoilt] = 0
    np.left_shift(codes[1::2], 4, out=packed)
    packed |= codes[::2]
    np.copyto(elements, packed[: elements.size], casting="unsafe")
    _widen_piece(values, elements, scales)


def _codes(magnitudes: Array, scratch: _Scratch) -> None:
    """Write the codes of float32 numbers from 0 to below 8 into `scratch.codes`."""
    n = magnitudes.size
    exponents, magic, codes = scratch.exponents[:n], scratch.magic[:n], scratch.codes[:n]
    np.right_shift(magnitudes.view(np.int32), 23, out=exponents)
    np.maximum(exponents, _ONE, out=exponents)
    np.add(exponents, _MAGIC_STEP, out=magic)
    magic <<= 23
    magic += _MAGIC_HALF
    sums = np.add(magnitudes, magic.view(np.float32), out=magic.view(np.float32))
    np.bitwise_and(sums.view(np.int32), 7, out=codes)
    exponents -= _ONE
    exponents *= 2
    codes += exponents
    np.minimum(codes, 7, out=codes)


def _widen_piece(values: Array, elements: Array, scales: Array) -> None:
    numbers = _PAIRS.take(elements, axis=0).reshape(-1)[: values.size]
    np.multiply(numbers, _WEIGHTS.take(scales).repeat(BLOCK)[: values.size], out=values)


def bind_widen(values: Array, payload: Array) -> Callable[[], Any]:
    """A function that writes the present contents of `payload` into `values`, float32."""
    elements, scales = _parts(payload.view(np.uint8), values.size)

    @np.errstate(all="ignore")  # no rank sends numbers that overflow here, but a broken one might
    def widen() -> None:
        for a in range(0, values.size, PIECE_ELEMENTS):
            b = a + PIECE_ELEMENTS
            _widen_piece(values[a:b], elements[a // 2 : b // 2], scales[a // BLOCK : b // BLOCK])

    return widen
