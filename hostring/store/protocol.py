"""Small messages of start-up: msgpack behind a four-byte length, bounded before a byte of it is believed.

They serve the store and the hello. The frames of a link are in `hostring.engine.frames`.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack

T = TypeVar("T")
PREFIX = struct.Struct("<I")


def pack(value: Any, limit: int) -> bytes:
    """Encode `value` without its length prefix.

    Raises:
        ValueError: it takes more than `limit` bytes, or holds what msgpack can't.
    """
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, OverflowError) as exc:
        raise ValueError(f"can't be put into a message: {exc}") from exc
    if len(data) > limit:
        raise ValueError(f"a message of {len(data)} bytes is over the limit of {limit}")
    return data


def unpack(data: bytes) -> Any:
    """Decode what `pack` made.

    Raises:
        ValueError: these bytes are no msgpack value.
    """
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=True)
    except Exception as exc:  # msgpack raises many kinds: its own, ValueError, UnicodeDecodeError, RecursionError
        raise ValueError(f"not a message of hostring: {type(exc).__name__}: {exc}") from exc


def typed(packed: Any, key: Any, kind: type[T]) -> T:
    """`packed[key]`, which must be a `kind` itself: a conversion could do too much, as `bytes(10**9)` does.

    Raises:
        ValueError: it is missing, or of another type.
    """
    try:
        value = packed[key]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"{key!r} is missing") from None
    if type(value) is not kind:
        raise ValueError(f"{key!r} is no {kind.__name__}")
    return value


def typed_fields(packed: Any, kinds: Mapping[str, type | list[type]]) -> dict[str, Any]:
    """The fields of the dict `packed` that `kinds` names; `[int]` stands for a list of nothing but int.

    Raises:
        ValueError: it is no dict, or a field is missing or of another type.
    """
    if not isinstance(packed, dict):
        raise ValueError("not a dict of fields")
    found = {}
    for key, kind in kinds.items():
        found[key] = value = packed.get(key)
        if isinstance(kind, list):
            if type(value) is not list or any(type(item) is not kind[0] for item in value):
                raise ValueError(f"{key!r} is no list of {kind[0].__name__}")
        elif type(value) is not kind:
            raise ValueError(f"{key!r} is no {kind.__name__}" if key in packed else f"{key!r} is missing")
    return found


def framed(data: bytes) -> bytes:
    """`data` with its length in front."""
    return PREFIX.pack(len(data)) + data


def checked_nbytes(prefix: bytes, limit: int) -> int:
    """The length that `prefix` announces.

    Raises:
        ValueError: it is over `limit`.
    """
    (nbytes,) = PREFIX.unpack(prefix)
    if nbytes > limit:
        raise ValueError(f"a message of {nbytes} bytes was announced, the limit is {limit}")
    return int(nbytes)


def prove(secret: bytes, role: str, *transcript: bytes) -> bytes:
    """A proof that the holder of `secret` has seen `transcript` and speaks in `role`.

    Every part goes in with its length, and the role too, so that nothing recorded or reflected fits elsewhere.
    """
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (b"hostring", role.encode(), *transcript):
        mac.update(PREFIX.pack(len(part)) + part)
    return mac.digest()


def proves(proof: Any, secret: bytes, role: str, *transcript: bytes) -> bool:
    """Whether `proof` is what `prove` gives, compared in constant time."""
    return isinstance(proof, bytes) and hmac.compare_digest(proof, prove(secret, role, *transcript))
