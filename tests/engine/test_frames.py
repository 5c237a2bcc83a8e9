"""Headers: what is one, and that a payload is taken only when its header says what this rank can use."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest
from feed import Feed

from hostring.arrays.dtypes import CODES, PAYLOAD_CODES
from hostring.engine.binding import Buffers
from hostring.engine.frames import EXPECTED_BYTES, Call, decode, payload_fields
from hostring.engine.session import Session
from hostring.errors import CollectiveMismatch, ProtocolError
from hostring.group.group import Group

FLOAT32 = CODES[np.dtype(np.float32)]
N_ELEMENTS = 6


def session(data: bytes) -> Session:
    """Rank 0 of two, on whose data link `data` comes in."""
    group = Group(0, 2, "test", 7, b"", peer_infos=[None, None])
    group.data = {1: Feed(data)}
    return Session(group, topology="mesh", order="rank", wire="float32", timeout=1.0)


def reduced(data: bytes) -> np.ndarray:
    """What an all-reduce of rank 0 makes of a message `data`."""
    mine = session(data)
    x = np.arange(N_ELEMENTS, dtype=np.float32)
    program = mine.planner.all_reduce(N_ELEMENTS, x.dtype, "sum", None)
    mine.engine.run(program, Buffers(x, np.empty(0, np.float32)), 0, 1.0, time.perf_counter())
    return x


@pytest.fixture
def header() -> bytes:
    """The header that rank 0 expects."""
    program = session(b"").planner.all_reduce(N_ELEMENTS, np.dtype(np.float32), "sum", None)
    return bytes(program.stages[0].incoming[0].header)


def test_bytes_of_another_protocol_or_version_are_no_header(header: bytes) -> None:
    assert decode(header) is not None
    for at in (0, 3, 4):  # two bytes of the magic, and the version
        other = bytearray(header)
        other[at] ^= 1
        assert decode(other) is None
        with pytest.raises(ProtocolError, match="bytes that are no hostring frame"):
            reduced(bytes(other) + bytes(4 * N_ELEMENTS))


def test_what_is_expected_is_taken(header: bytes) -> None:
    theirs = np.array([10, 20, 30, 40, 50, 60], np.float32)
    expected = np.arange(N_ELEMENTS) + theirs
    np.testing.assert_array_equal(reduced(header + theirs.tobytes()), expected)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        payload = theirs.astype(dtype)
        fields = payload_fields(PAYLOAD_CODES[payload.dtype], payload.nbytes)
        np.testing.assert_array_equal(reduced(header[:EXPECTED_BYTES] + fields + payload.tobytes()), expected)


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("float32", 4 * N_ELEMENTS + 4),
        ("float32", 1 << 40),
        ("float32", 0),
        ("float16", 2 * N_ELEMENTS + 2),
        ("float16", 2 * N_ELEMENTS - 2),
        ("int32", 4 * N_ELEMENTS),  # of the right length
        ("complex64", 8 * N_ELEMENTS),
        ("int8", N_ELEMENTS),
    ],
)
def test_a_payload_of_a_wrong_length_or_kind_is_a_mismatch(header: bytes, dtype: str, nbytes: int) -> None:
    fields = payload_fields(CODES[np.dtype(dtype)], nbytes)
    with pytest.raises(CollectiveMismatch, match=f"{nbytes} bytes of {dtype}.*can't take that as 6 of float32"):
        reduced(header[:EXPECTED_BYTES] + fields + bytes(8 * N_ELEMENTS))


def test_a_payload_dtype_that_nobody_knows_is_a_mismatch(header: bytes) -> None:
    with pytest.raises(CollectiveMismatch, match="dtype code 99"):
        reduced(header[:EXPECTED_BYTES] + payload_fields(99, 4 * N_ELEMENTS) + bytes(4 * N_ELEMENTS))


def test_every_field_of_the_expected_part_is_compared(header: bytes) -> None:
    for at in range(EXPECTED_BYTES):
        other = bytearray(header)
        other[at] ^= 1
        with pytest.raises((CollectiveMismatch, ProtocolError)):
            reduced(bytes(other) + bytes(4 * N_ELEMENTS))


def test_a_call_says_itself_in_words() -> None:
    assert "all_reduce #3 of 10 elements, float32, op sum" in Call("all_reduce", "sum", FLOAT32, "rank", 10).describe(3)
