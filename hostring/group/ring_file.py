"""Reads a RING_CONFIG file: the static configuration of one rank of a ring."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from typing import Any, Final

from hostring.transports.addresses import is_loopback, numeric, split_address

KEYS: Final = ("master_ip", "master_port", "port", "right_ip", "right_port", "rank", "world_size")
MAX_NBYTES: Final = 1 << 16
MAX_RANKS: Final = 1 << 20


@dataclass(frozen=True)
class Ring:
    """Where one rank of a ring waits, and whom it dials.

    Attributes:
        master_ip: host of the master; None on the master itself.
        master_port: port of the master.
        port: where this rank waits for its left neighbour.
        right_ip, right_port: where the right neighbour, rank + 1, waits.
    """

    master_ip: str | None
    master_port: int
    port: int
    right_ip: str
    right_port: int


def read_ring(path: str) -> tuple[int, int, Ring]:
    """Read a RING_CONFIG file: a JSON object with exactly the keys of the example.

        {"master_ip": null, "master_port": 9002, "port": 9000, "right_ip": "192.168.77.2", "right_port": 9001,
         "rank": 0, "world_size": 2}

    Returns:
        rank, world size, and the rest.

    Raises:
        ValueError: one line that names the file, the key, its value and what is accepted.
    """
    fields = _Fields(path, _object(path))
    world_size = fields.integer("world_size", 1, MAX_RANKS)
    ring = Ring(
        master_ip=None if fields.values["master_ip"] is None else fields.host("master_ip"),
        master_port=fields.integer("master_port", 1, 65535),
        port=fields.integer("port", 1, 65535),
        right_ip=fields.host("right_ip"),
        right_port=fields.integer("right_port", 1, 65535),
    )
    if world_size > 1 and is_loopback(ring.right_ip) and ring.port == ring.right_port:
        raise fields.wrong("right_port", "on this host a port other than this rank's own")
    return fields.integer("rank", 0, world_size - 1), world_size, ring


def _object(path: str) -> dict[str, Any]:
    """The JSON object in the file, with all keys there and no other."""
    expected = f"expected a JSON object with the keys {', '.join(KEYS)}"
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_NBYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: a path that no system call takes
        raise ValueError(f"RING_CONFIG={path}: {getattr(exc, 'strerror', None) or exc}; {expected}") from None
    if len(data) > MAX_NBYTES:
        raise ValueError(f"RING_CONFIG={path}: longer than {MAX_NBYTES} bytes; {expected}")
    try:
        found = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"RING_CONFIG={path}: no JSON: {exc}; {expected}") from None
    if not isinstance(found, dict):
        raise ValueError(f"RING_CONFIG={path}: {reprlib.repr(found)}; {expected}")
    missing, unknown = [k for k in KEYS if k not in found], [k for k in found if k not in KEYS]
    for problem, keys in (("lacks", missing), ("has the unknown", unknown)):
        if keys:
            named = ", ".join(k if k.isidentifier() else reprlib.repr(k) for k in keys)
            raise ValueError(f"RING_CONFIG={path}: {problem} key{'s' if len(keys) > 1 else ''} {named}; {expected}")
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


@dataclass(frozen=True)
class _Fields:
    """The values of one file, read as what they must be."""

    path: str
    values: dict[str, Any]

    def wrong(self, key: str, expected: str) -> ValueError:
        return ValueError(f"RING_CONFIG={self.path}: {key} is {reprlib.repr(self.values[key])}, expected {expected}")

    def integer(self, key: str, lowest: int, highest: int) -> int:
        value = self.values[key]
        if type(value) is not int or not lowest <= value <= highest:  # bool is an int, too
            raise self.wrong(key, f"a whole number from {lowest} to {highest}")
        return value

    def host(self, key: str) -> str:
        value, expected = self.values[key], "a host" + (" or null" if key == "master_ip" else "")
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, expected)
        try:
            host = split_address(value, 1)[0]
        except ValueError as exc:
            raise self.wrong(key, f"{expected} ({exc})") from None
        address = numeric(host)
        unprintable = any(c.isspace() or not c.isprintable() for c in host)
        if unprintable or (":" in host if address is None else address.is_unspecified):
            raise self.wrong(key, f"{expected} that can be dialled")
        return host
