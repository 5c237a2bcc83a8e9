"""A training state as bytes: nested dicts and lists of arrays, numbers and texts. Nothing in it is ever executed.

Equal states give equal bytes on every rank: dicts are sorted by their keys, and arrays are packed in C order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack
import numpy as np

from hostring.arrays.dtypes import BY_NAME, Array, name_of
from hostring.arrays.staging import adapter_for

_ARRAY: Final = 1  # msgpack's code of an array
MAX_ARRAY_NBYTES: Final = (1 << 32) - 1024  # msgpack counts the bytes of one array in 32 bits


def pack(state: Any) -> bytes:
    """`state` as bytes.

    Args:
        state: None, bool, int, float, str, bytes, arrays of any library, and dicts (with keys of str or int), lists and
            tuples of them. `state_dict()` of torch's modules and optimisers is one.

    Raises:
        TypeError: it holds something else. ValueError: an array is larger than 4 GiB.
    """
    packed: bytes = msgpack.packb(_plain(state), use_bin_type=True)
    return packed


def unpack(data: bytes, as_array: Callable[[Array], Any] = np.asarray) -> Any:
    """What `pack` made bytes of. Tuples have become lists.

    Args:
        as_array: makes each array of a numpy array, `torch.from_numpy` for example.
    """

    def array(code: int, packed: bytes) -> Any:
        if code != _ARRAY:
            raise ValueError(f"a training state holds an unknown kind {code} of data; do all ranks run one version?")
        name, shape, raw = msgpack.unpackb(packed)
        return as_array(np.frombuffer(bytearray(raw), BY_NAME[name]).reshape(shape))

    limit = max(len(data), 1)
    return msgpack.unpackb(data, ext_hook=array, strict_map_key=False, max_ext_len=limit, max_bin_len=limit)


def digest(state: Any) -> str:
    """sha256 of `pack(state)`, as hexadecimal digits."""
    return hashlib.sha256(pack(state)).hexdigest()


def _plain(x: Any) -> Any:
    """`x` as what msgpack knows."""
    if x is None or isinstance(x, bool | int | float | str | bytes):
        return x
    if isinstance(x, Mapping):
        return {key: _plain(x[key]) for key in sorted(x, key=_sorted_as)}
    if isinstance(x, list | tuple):
        return [_plain(item) for item in x]
    return _packed_array(x)


def _sorted_as(key: Any) -> tuple[bool, Any]:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise TypeError(f"a training state has the key {key!r}; use str and int")
    return isinstance(key, str), key


def _packed_array(x: Any) -> msgpack.ExtType:
    try:
        adapter = adapter_for(x)
    except TypeError as exc:
        raise TypeError(f"a training state can't hold {x!r}: {exc}") from None
    host = adapter.view(x)
    if host is None:
        host = np.empty(math.prod(x.shape), adapter.dtype(x))
        adapter.stage(x, host)
    if host.nbytes > MAX_ARRAY_NBYTES:
        raise ValueError(f"an array of {host.nbytes} bytes is larger than 4 GiB; split it")
    return msgpack.ExtType(_ARRAY, msgpack.packb([name_of(host.dtype), list(x.shape), host.tobytes()]))
