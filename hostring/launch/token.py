"""The token that lets machines join a cluster: where it is, how many belong to it, until when, and its secret."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import base58
import msgpack

from hostring.transports.addresses import Address

SECRET_NBYTES = 16
MAX_CHARACTERS = 1024
_VERSION = 1


@dataclass(frozen=True)
class Token:
    """What a joining machine has to know.

    Attributes:
        addresses: where the cluster's store is, to be tried in turn.
        world_size: how many ranks belong together.
        expires: Unix time after which nobody may join.
        secret: shared by the group. The token is as secret as this is.
    """

    addresses: tuple[Address, ...]
    world_size: int
    expires: int
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        """Base58 with a checksum: no letters that look alike, and a mistyped one is noticed."""
        packed = msgpack.packb(
            [_VERSION, self.world_size, self.expires, self.secret, [list(a) for a in self.addresses]]
        )
        return base58.b58encode_check(packed).decode()

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read a token.

        Raises:
            ValueError: it is mistyped, cut off, or of another version of hostring.
        """
        text = text.strip()
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"a join token has at most {MAX_CHARACTERS} characters, this has {len(text)}")
        try:
            fields = msgpack.unpackb(base58.b58decode_check(text), max_bin_len=64, max_str_len=256, max_array_len=32)
        except ValueError as exc:
            raise ValueError("this is no join token, or it is mistyped or cut off: its checksum is wrong") from exc
        if not isinstance(fields, list) or not fields or fields[0] != _VERSION:
            raise ValueError("this join token is of another version of hostring; use the same one on all machines")
        try:
            _, world_size, expires, secret, addresses = fields
            found = tuple((host, port) for host, port in addresses)
        except (ValueError, TypeError) as exc:
            raise ValueError("this join token is incomplete") from exc
        numbers = isinstance(world_size, int) and isinstance(expires, int) and isinstance(secret, bytes)
        if (
            not numbers
            or not found
            or not all(isinstance(h, str) and isinstance(p, int) and 0 < p < 1 << 16 for h, p in found)
        ):
            raise ValueError("this join token does not hold what it should")
        return cls(found, world_size, expires, secret)


def read_token_file(path: Path) -> Token | None:
    """The token of the last start; None where there is no such file yet.

    Raises:
        ValueError: the file holds no token.
    """
    if not path.exists():
        return None
    try:
        return Token.parse(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ValueError(f"--token-file {path}: {exc}; remove the file for a new token") from exc


def write_token_file(path: Path, token: Token) -> None:
    """Keep a token for the next start, where this user alone can read it."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f"{token}\n")
    beside.replace(path)
