"""The head's hashes of pieces of its files: each is computed once, and kept for the next start."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from hostring.shipping.extents import Extent, map_bytes
from hostring.shipping.storage import cache_home


class Hashes:
    """SHA-256 of pieces of some files, by piece. The record is void when a file has changed.

    Args:
        files: the model's.
        home: the folder of the records; in the user's cache when not given.
    """

    def __init__(self, files: Sequence[Path], home: Path | None = None) -> None:
        self._mapped = [map_bytes(file) for file in files]
        stats = [file.stat() for file in files]
        who = [[str(file.resolve()), s.st_size, s.st_mtime_ns, s.st_ino] for file, s in zip(files, stats, strict=True)]
        key = hashlib.sha256(json.dumps(who).encode()).hexdigest()[:32]
        self._record = (home or cache_home() / "hashes") / f"{key}.jsonl"
        self._known: dict[Extent, bytes] = dict(read_record(self._record))
        self._lock = threading.Lock()

    def nbytes(self, file: int) -> int:
        """Of a file; 0 where there is none with this number."""
        return int(self._mapped[file].size) if file < len(self._mapped) else 0

    def known(self, piece: Extent) -> bytes | None:
        """Its hash, if it was computed before."""
        with self._lock:
            return self._known.get(piece)

    def read(self, piece: Extent) -> tuple[bytes, bytes]:
        """Its hash, and its bytes."""
        content = piece.read(self._mapped[piece.file])
        found = self.known(piece)
        if found is None:
            found = hashlib.sha256(content).digest()
            with self._lock:
                self._known[piece] = found
                append_record(self._record, piece, found)
        return found, content


def read_record(file: Path) -> list[tuple[Extent, bytes]]:
    """Pieces and their hashes, as they were appended. A line that was cut off counts for nothing."""
    found = []
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                *numbers, digest = json.loads(line)
                found.append((Extent(*numbers), bytes.fromhex(digest)))
            except (ValueError, TypeError):
                continue
    return found


def append_record(file: Path, piece: Extent, digest: bytes) -> None:
    """Add a piece."""
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps([piece.file, piece.offset, piece.width, piece.stride, piece.count, digest.hex()])
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)
