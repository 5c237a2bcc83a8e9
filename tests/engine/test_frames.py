"""Headers: what is one, and what each field says of the call or message."""

from __future__ import annotations

import numpy as np

from hostring.arrays.dtypes import CODES
from hostring.engine.frames import Call, decode

FLOAT32 = CODES[np.dtype(np.float32)]


def test_bytes_of_another_protocol_or_version_are_no_header():
    header = Call("all_reduce", "sum", FLOAT32, "rank", 10).header(0, 0, FLOAT32, 40)
    assert decode(header) is not None
    for at in (0, 3, 4):  # two bytes of the magic, and the version
        other = bytearray(header)
        other[at] ^= 1
        assert decode(other) is None
