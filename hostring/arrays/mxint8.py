"""MXINT8: blocks of 32 consecutive float32 numbers that share a power of two and keep 8 bits each.

A payload of n elements is n signed bytes, then one byte per block, its scale: the float32 exponent of the block's
largest magnitude. Element q of a block of scale E stands for q * 2^(E - 133). The last block may be short. A scale of
255 makes the whole block NaN. Source: OCP Microscaling Formats (MX) Specification 1.0, which orders the bytes in
another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hostring.arrays.blocks import largest_of_blocks
from hostring.arrays.dtypes import BLOCK, Array

# Elements that one numpy call works on: enough to make the call's overhead small, few enough for a cache.
_PIECE: Final = 1 << 16
_LARGEST: Final = 127
_MANTISSA_BITS: Final = np.array(23, np.int32)  # an array: making one takes numpy longer than shifting a few numbers
_HUGE: Final = 238 << 23  # the bits of 2^111: from here on `_MAGIC` would overflow; NaN and infinity are here too
_SCALES: Final = np.arange(256)
with np.errstate(all="ignore"):  # the smallest weight is a subnormal number
    _WEIGHTS: Final = np.ldexp(1.0, _SCALES - 133).astype(np.float32)
_WEIGHTS[255] = np.nan
# x + 1.5 * 2^(e + 17) has its last bit at 2^(e - 6): the addition rounds to nearest even and leaves 64 / 2^e * x in the
# lowest byte.
_MAGIC: Final = np.where(_SCALES < 238, np.ldexp(1.5, _SCALES - 110), 0).astype(np.float32)


def round_to_blocks(values: Array, payload: Array) -> None:
    """Round `values`, float32, in place to numbers that MXINT8 can hold, and write them as a payload.

    Args:
        payload: uint8, of `nbytes_of(values.size, MXINT8)` bytes.
    """
    n_elements = values.size
    elements, scales = payload[:n_elements].view(np.int8), payload[n_elements:]
    for a in range(0, n_elements, _PIECE):
        _round_piece(values[a : a + _PIECE], elements[a : a + _PIECE], scales[a // BLOCK : (a + _PIECE) // BLOCK])


def _round_piece(values: Array, elements: Array, scales: Array) -> None:
    n_elements = values.size
    scratch = sums = np.empty(scales.size * BLOCK, np.float32)
    if n_elements < scratch.size:
        scratch[n_elements:] = 0
        sums = scratch[:n_elements]
    np.abs(values, out=sums)
    largest = largest_of_blocks(scratch.view(np.int32))
    huge = _take_huge(values, largest) if largest.item(largest.argmax()) >= _HUGE else None
    scales[...] = largest >> _MANTISSA_BITS
    magic = _MAGIC.take(scales).repeat(BLOCK)[:n_elements]
    np.add(values, magic, out=sums)
    np.copyto(elements, sums.view(np.int32), casting="unsafe")
    np.subtract(sums, magic, out=values)
    if b"\x80" in elements.tobytes():  # 128 has become -128 too
        (over,) = (elements == -_LARGEST - 1).nonzero()
        values[over] *= np.float32(_LARGEST / (_LARGEST + 1))
        elements[over] = np.where(values[over] < 0, -_LARGEST, _LARGEST)
    if huge is not None:
        _put_huge(values, elements, scales, *huge)


def _take_huge(values: Array, largest: Array) -> tuple[Array, Array]:
    """Put zeros in place of the blocks from 2^111 on, and of those with a NaN or an infinity.

    Returns:
        their positions, shape (huge blocks, 32), which repeat the last element where a block is short; and their
        values.
    """
    (numbers,) = (largest >= _HUGE).nonzero()
    where = np.minimum(numbers[:, None] * BLOCK + np.arange(BLOCK), values.size - 1)
    held = values[where]
    values[where] = 0
    largest[numbers] = 0
    return where, held


@np.errstate(all="ignore")
def _put_huge(values: Array, elements: Array, scales: Array, where: Array, held: Array) -> None:
    """Round what `_take_huge` returned, in float64."""
    exponents = (held.view(np.uint32) & 0x7FFFFFFF).max(axis=1) >> 23
    rounded = np.rint(held * np.ldexp(1.0, 133 - exponents.astype(np.int64))[:, None])
    rounded[exponents == 255] = 0
    elements[where] = np.clip(rounded, -_LARGEST, _LARGEST)
    scales[where[:, 0] // BLOCK] = exponents
    values[where] = elements[where] * _WEIGHTS[exponents][:, None]


def bind_widen(values: Array, payload: Array) -> Callable[[], Any]:
    """A function that writes the present contents of `payload` into `values`, float32."""
    n_elements = values.size
    payload = payload.view(np.uint8)
    elements, scales = payload[:n_elements].view(np.int8), payload[n_elements:]
    pieces = [
        (values[a : a + _PIECE], elements[a : a + _PIECE], scales[a // BLOCK : (a + _PIECE) // BLOCK])
        for a in range(0, n_elements, _PIECE)
    ]

    @np.errstate(all="ignore")  # no rank sends numbers that overflow here, but a broken one might
    def widen() -> None:
        for target, source, exponents in pieces:
            np.copyto(target, source)
            np.multiply(target, _WEIGHTS.take(exponents).repeat(BLOCK)[: target.size], out=target)

    return widen
