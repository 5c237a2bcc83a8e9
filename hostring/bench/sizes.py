"""Message sizes as people write them: 64K, 4B:32M, 4B:32M:2."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MAX_NBYTES = 1 << 34


def parse_size(text: str) -> int:
    """Bytes. Units are powers of 1024; "4", "4B", "64K", "64KiB" and "1.5M" all work.

    Raises:
        ValueError: not a size.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise ValueError(f"size {text!r}: expected a number with B, K, M or G, such as 64K")
    nbytes = int(float(found[1]) * _UNITS[found[2]])
    if nbytes > MAX_NBYTES:
        raise ValueError(f"size {text!r} is over {MAX_NBYTES >> 30} GiB")
    return nbytes


def parse_sizes(text: str) -> list[int]:
    """A list with commas. An item may be a range, MIN:MAX or MIN:MAX:FACTOR. It includes MAX; FACTOR is 4 by default.

    Raises:
        ValueError: names the part that is wrong.
    """
    sizes: list[int] = []
    for item in text.split(","):
        ends = item.split(":")
        if len(ends) == 1:
            sizes.append(parse_size(item))
        elif len(ends) <= 3:
            sizes += _range(parse_size(ends[0]), parse_size(ends[1]), _factor(ends[2:], item), item)
        else:
            raise ValueError(f"sizes {item!r}: expected MIN:MAX or MIN:MAX:FACTOR")
    return sorted(dict.fromkeys(sizes))


def _factor(text: list[str], item: str) -> float:
    try:
        return float(text[0].lstrip("x*")) if text else 4.0
    except ValueError:
        raise ValueError(f"sizes {item!r}: FACTOR {text[0]!r} is not a number") from None


def _range(low: int, high: int, factor: float, item: str) -> list[int]:
    if not 0 < low <= high or not 1 < factor < math.inf:
        raise ValueError(f"sizes {item!r}: expected 0 < MIN <= MAX and FACTOR > 1")
    found, size = [], float(low)
    while size < high:
        found.append(int(size))
        size *= factor
    return [*found, high]


def show(nbytes: int) -> str:
    """The shortest exact way to write it: 4, 64K, 1M."""
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)
