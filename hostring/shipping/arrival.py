"""The bytes of a model, where a rank needs them: from its cache, from files of its own, or from the head."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hostring.shipping.extents import Extent, map_bytes, without_contained
from hostring.shipping.folder import ModelFolder
from hostring.shipping.storage import make_room
from hostring.shipping.supplier import Supplier

log = logging.getLogger("hostring")


@dataclass
class Arrived:
    """Bytes of a rank's part of the model.

    Attributes:
        planned: that it needs by the plan. read: that its loader has asked for; each byte counts once in both.
        shipped: that came from the head. cached: that were in the cache. local: that its own copy of the model had.
        damaged: pieces of the cache that were not what they had been, and came again.
    """

    planned: int = 0
    read: int = 0
    shipped: int = 0
    cached: int = 0
    local: int = 0
    damaged: int = 0

    def as_json(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        elsewhere = ((self.cached, "the cache"), (self.local, "this machine's own copy"))
        had = [f"{n / 1e6:,.1f} MB from {where}" for n, where in elsewhere if n]
        more = "".join(f", {text}" for text in had)
        return f"{self.shipped / 1e6:,.1f} MB received of {self.planned / 1e6:,.1f} MB planned{more}"


@dataclass
class Arrival:
    """Makes bytes of a model's files present before they are read.

    Attributes:
        local: the same model on this machine, as far as its files have the same sizes; may be empty.
        progress: told what has arrived, after each piece.
    """

    folder: ModelFolder
    supplier: Supplier
    local: Sequence[Path] = ()
    progress: Callable[[Arrived], None] = lambda arrived: None
    arrived: Arrived = field(default_factory=Arrived)
    _here: list[Extent] = field(default_factory=list)
    _read: list[Extent] = field(default_factory=list)
    _cached: set[Extent] = field(default_factory=set)

    def plan(self, extents: Iterable[Extent]) -> None:
        """Get what is going to be read, all at once.

        Raises:
            HostringError: the head can't be reached, or is another one.
            OSError: the disk is full.
        """
        missing = without_contained(extents, self._here)
        self.arrived.planned += sum(extent.nbytes for extent in missing)
        self._get(missing)

    def read(self, extents: Iterable[Extent]) -> None:
        """These bytes are read now. What was not planned is got as well."""
        fresh = without_contained(extents, self._read)
        self._read += fresh
        self._get(without_contained(fresh, self._here))

    def account(self) -> Arrived:
        """What has arrived, and how much of it was read."""
        self.arrived.read = sum(extent.nbytes for extent in without_contained(self._read))
        return self.arrived

    def close(self) -> None:
        """Let the connection and the folder go. What is here stays."""
        self.supplier.close()
        self.folder.close()

    def _get(self, missing: Sequence[Extent]) -> None:
        if not missing:
            return
        pieces = [piece for extent in missing for piece in extent.pieces()]
        wanted = [(piece, self._have(piece)) for piece in pieces]
        make_room(self.folder.folder, sum(piece.nbytes for piece, digest in wanted if digest is None))
        for piece, digest, content in self.supplier.fetch(wanted, self.arrived.planned):
            self._take(piece, digest, content)
            self.progress(self.arrived)
        self._here += missing

    def _have(self, piece: Extent) -> bytes | None:
        """The hash of what this machine has of a piece."""
        digest = self.folder.digest(piece)
        if digest is not None:
            self._cached.add(piece)
        elif self.folder.recorded(piece):
            self.arrived.damaged += 1
            path = self.folder.path_of(piece.file)
            log.warning("hostring: %s is damaged at byte %d; that piece is fetched again", path, piece.offset)
        if digest is None and self.local:
            digest = hashlib.sha256(piece.read(map_bytes(self.local[piece.file]))).digest()
        return digest

    def _take(self, piece: Extent, digest: bytes, content: bytes | None) -> None:
        if content is not None:
            self.arrived.shipped += piece.nbytes
            self.folder.put(piece, digest, content)
        elif piece in self._cached:
            self.arrived.cached += piece.nbytes
        else:
            self.arrived.local += piece.nbytes
            self.folder.put(piece, digest, piece.read(map_bytes(self.local[piece.file])))
