"""The header of a message is checked before its payload is believed."""

from __future__ import annotations

import numpy as np
import pytest
from feed import Feed

from hostring.arrays.dtypes import CODES
from hostring.engine.counters import Counters
from hostring.engine.frames import Call, message_header
from hostring.engine.matching import Matching, MessageWork
from hostring.engine.message_link import MessageLink
from hostring.errors import PeerLostError, ProtocolError

FLOAT32 = CODES[np.dtype(np.float32)]
TAG = 5


def received(data: bytes) -> np.ndarray:
    """What a receive of three numbers gets from a link on which `data` comes in."""
    matching = Matching([1])
    work = MessageWork("recv", 5.0)
    work.into, work.wanted, work.tag = np.zeros(3, np.float32), 1, TAG
    matching.post(work)
    link = MessageLink(1, Feed(data), matching, Counters({}), 7)
    with pytest.raises(PeerLostError):
        link.pull()
    assert work.is_completed()
    return work.into


def test_a_good_message_is_taken() -> None:
    numbers = np.array([1, 2, 3], np.float32)
    np.testing.assert_array_equal(received(message_header(TAG, 0, 3, FLOAT32, 12, 7) + numbers.tobytes()), numbers)


@pytest.mark.parametrize("nbytes", [0, 11, 13, 16, 1 << 40])
def test_a_length_that_does_not_fit_the_elements_is_an_error(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"rank 1 sent a message of 3 elements in {nbytes} bytes"):
        received(message_header(TAG, 0, 3, FLOAT32, nbytes, 7) + bytes(12))


def test_a_frame_of_a_collective_is_an_error() -> None:
    header = Call("all_reduce", "sum", FLOAT32, "rank", 3, epoch=7).header(0, 0, FLOAT32, 12)
    with pytest.raises(ProtocolError, match="bytes on its message link that are no hostring frame"):
        received(bytes(header) + bytes(12))


def test_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="bytes on its message link that are no hostring frame"):
        received(message_header(TAG, 0, 3, 99, 12, 7) + bytes(12))


def test_a_message_for_which_there_is_no_memory_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="for which there is no memory"):
        received(message_header(TAG + 1, 0, 1 << 60, FLOAT32, 1 << 62, 7))
