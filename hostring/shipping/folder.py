"""A model of which parts are here: files of the same names and sizes as at the head, with holes where nothing is."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hostring.shipping.extents import Extent, map_bytes
from hostring.shipping.hashes import append_record, read_record
from hostring.shipping.storage import locked, no_room

_RECORD = "pieces.jsonl"


@dataclass(frozen=True)
class ShippedFile:
    """A file of the model.

    Attributes:
        name: relative to the model's folder.
        lead_nbytes: how many bytes of it, from the first on, every rank needs: a header, or all of a small file.
    """

    name: str
    nbytes: int
    lead_nbytes: int

    def __post_init__(self) -> None:
        path = Path(self.name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in self.name:
            raise ValueError(f"{self.name!r} is no name of a file in a model's folder")
        if not 0 <= self.lead_nbytes <= self.nbytes:
            raise ValueError(f"{self.name} has {self.nbytes} bytes, and {self.lead_nbytes} of them come first")


class ModelFolder:
    """The files, and a record of the pieces that are in them, with their hashes.

    A file appears under its name once it has its full size. A piece is in the record once it was written.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: Path, files: Sequence[ShippedFile]) -> None:
        self.folder, self._files = folder, list(files)
        (folder / "model").mkdir(parents=True, exist_ok=True)
        self._open = contextlib.ExitStack()
        self._open.enter_context(locked(folder))
        self._record = folder / _RECORD
        kept = [self._made(n) for n in range(len(files))]
        self._digests = {piece: digest for piece, digest in read_record(self._record) if kept[piece.file]}
        self._mapped = [map_bytes(self.path_of(n)) for n in range(len(files))]

    def path_of(self, file: int) -> Path:
        return self.folder / "model" / self._files[file].name

    def digest(self, piece: Extent) -> bytes | None:
        """The hash of a piece that is here and whole."""
        wanted = self._digests.get(piece)
        if wanted is None or hashlib.sha256(piece.read(self._mapped[piece.file])).digest() == wanted:
            return wanted
        return None

    def recorded(self, piece: Extent) -> bool:
        """Whether it was here once. It may be damaged since."""
        return piece in self._digests

    def put(self, piece: Extent, digest: bytes, content: bytes) -> None:
        """Write a piece, and record it.

        Raises:
            OSError: the disk is full.
        """
        try:
            with self.path_of(piece.file).open("r+b", buffering=0) as file:
                piece.write(file, content)
            append_record(self._record, piece, digest)
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(self.folder).free
                raise OSError(exc.errno, no_room(self.folder, piece.nbytes, free)) from exc
            raise
        self._digests[piece] = digest

    def close(self) -> None:
        """Let others prune it."""
        self._open.close()

    def _made(self, number: int) -> bool:
        """Make a file of holes, unless it is here in its full size. Returns whether it was."""
        file, path = self._files[number], self.path_of(number)
        if path.exists() and path.stat().st_size == file.nbytes:
            return True
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        with beside.open("wb") as made:
            made.truncate(file.nbytes)
        beside.replace(path)
        return False
