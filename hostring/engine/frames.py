"""Frames: a header of 64 bytes, then the payload. Little-endian on every machine.

The first 48 bytes say which message of which call this is. Both ends know them beforehand, so the check is one
comparison of bytes, and only a mismatch is decoded, to explain both sides. The last 16 say what the sender brought:
dtype and length.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from hostring.arrays.dtypes import IN_BLOCKS, NAMES, OPS, PAYLOADS, kind_name
from hostring.arrays.fold import ORDERS

VERSION: Final = 1
MAGIC: Final = b"hRng"
HEADER_BYTES: Final = 64
EXPECTED_BYTES: Final = 48
SEQ_OFFSET: Final = 16

COLLECTIVES: Final = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier",
    "decide", "send",
)  # fmt: skip

_ROOTED: Final = ("reduce", "broadcast", "gather", "scatter", "decide")

KIND_COLLECTIVE: Final = 1
KIND_MESSAGE: Final = 2
NO_OP: Final = 255

_HEADER: Final = struct.Struct("<4sBBHIIQBBBBIIQ4xB7xQ")
_PAYLOAD: Final = struct.Struct("<B7xQ")
SEQ: Final = struct.Struct("<Q")
START_SEQ: Final = 1 << 63  # the calls with which a group starts are numbered from here on, apart from the user's
assert _HEADER.size == HEADER_BYTES == EXPECTED_BYTES + _PAYLOAD.size


@dataclass(frozen=True)
class Call:
    """Which collective this is: the same on every rank, or the call is a mismatch.

    Attributes:
        kind: what the payload must be: the code of the wire dtype of a reduction, a `kind_code` for data that moves.
        detail: the root of a rooted collective, or a checksum of uneven counts or of a list's arrays, or 0.
        n_elements: of the whole buffer; of one rank's share where the shares are even.
        schedule: the code of topology and variant.
    """

    collective: str
    op: str | None
    kind: int
    order: str
    n_elements: int
    detail: int = 0
    schedule: int = 0
    epoch: int = 0

    def header(self, round_: int, part: int, payload_dtype: int, payload_nbytes: int) -> bytearray:
        """A header for message `part` of `round_`, its sequence number still 0."""
        return bytearray(
            _HEADER.pack(
                MAGIC, VERSION, KIND_COLLECTIVE, self.schedule, self.epoch, self.detail, 0,
                COLLECTIVES.index(self.collective), NO_OP if self.op is None else OPS.index(self.op), self.kind,
                ORDERS.index(self.order), round_, part, self.n_elements, payload_dtype, payload_nbytes,
            )
        )  # fmt: skip

    def describe(self, seq: int) -> str:
        """In words, as call number `seq`."""
        header = self.header(0, 0, 0, 0)
        SEQ.pack_into(header, SEQ_OFFSET, seq)
        decoded = decode(header)
        assert decoded is not None
        return decoded.describe_call()


def payload_fields(payload_dtype: int, nbytes: int) -> bytes:
    """The last bytes of a header: what the sender brought."""
    return _PAYLOAD.pack(payload_dtype, nbytes)


def payload_nbytes(header: bytes | bytearray) -> int:
    """What a header says of its payload."""
    return int.from_bytes(header[HEADER_BYTES - 8 : HEADER_BYTES], "little")


def numbered(seq: int) -> str:
    """A call's number in words."""
    return f"#{seq}" if seq < START_SEQ else f"#{seq - START_SEQ} of the start"


@dataclass(frozen=True)
class Header:
    """A decoded header."""

    kind: int
    schedule: int
    epoch: int
    detail: int
    seq: int
    collective: int
    op: int
    dtype: int
    order: int
    round: int
    part: int
    n_elements: int
    payload_dtype: int
    payload_nbytes: int

    def describe_call(self) -> str:
        """In words: which call the sender of this header was in."""
        name = COLLECTIVES[self.collective] if self.collective < len(COLLECTIVES) else f"collective {self.collective}"
        words = [f"{name} {numbered(self.seq)} of {self.n_elements} elements, {kind_name(self.dtype)}"]
        if self.op < len(OPS):
            words.append(f"op {OPS[self.op]}")
        if name in _ROOTED:
            words.append(f"root {self.detail}")
        elif self.detail:
            words.append(f"{'arrays' if name == 'all_reduce' else 'counts'} {self.detail:08x}")
        words.append(f"order {ORDERS[self.order] if self.order < len(ORDERS) else self.order}")
        return ", ".join(words)

    def differs_from(self, other: Header) -> str:
        """In words: in what these two calls differ, as seen from this side; empty where only the payloads do."""
        in_words = {"collective": "collective", "seq": "number of the call", "n_elements": "number of elements",
        "dtype": "dtype",
                    "op": "operator", "order": "order"}  # fmt: skip
        if self.collective == other.collective < len(COLLECTIVES):
            in_words["detail"] = _detail_in_words(COLLECTIVES[self.collective])
        found = [words for field, words in in_words.items() if getattr(self, field) != getattr(other, field)]
        inside = [
            (field, getattr(self, field), getattr(other, field)) for field in ("schedule", "epoch", "round", "part")
        ]
        return ", ".join(
            found or [f"{field} ({mine} here, {theirs} there)" for field, mine, theirs in inside if mine != theirs]
        )

    def describe(self) -> str:
        """In words: what the sender of this header was doing."""
        message = f"round {self.round}.{self.part}, payload {self.payload_nbytes} bytes of {self.dtype_name()}"
        return f"{self.describe_call()}, schedule {self.schedule}, epoch {self.epoch}, {message}"

    def dtype_name(self) -> str:
        payload = PAYLOADS.get(self.payload_dtype)
        if payload in IN_BLOCKS:
            return IN_BLOCKS[payload]
        return NAMES[self.payload_dtype] if self.payload_dtype < len(NAMES) else f"dtype code {self.payload_dtype}"


def _detail_in_words(collective: str) -> str:
    if collective == "all_reduce":
        return "sizes of the arrays, or which of their elements share memory"
    return "root" if collective in _ROOTED else "counts"


def decode(header: bytes | bytearray | memoryview) -> Header | None:
    """The fields of a header, or None when these bytes are no hostring header of this version."""
    magic, version, *fields = _HEADER.unpack_from(header)
    return Header(*fields) if magic == MAGIC and version == VERSION else None


def message_header(
    tag: int, seq: int, n_elements: int, payload_dtype: int, payload_nbytes: int, epoch: int = 0
) -> bytes:
    """The header of a point-to-point message.

    The tag travels in the `n_elements`-independent `detail` and `round` fields.
    """
    return _HEADER.pack(
        MAGIC, VERSION, KIND_MESSAGE, 0, epoch, tag & 0xFFFFFFFF, seq, COLLECTIVES.index("send"), NO_OP, payload_dtype,
        0, tag >> 32, 0, n_elements, payload_dtype, payload_nbytes,
    )  # fmt: skip
