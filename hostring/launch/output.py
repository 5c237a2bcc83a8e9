"""What ranks print, as their launcher passes it on: whole lines, and one rank's traceback at a time."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import IO, Any, Final

HOLD_S = 2.0  # how long a traceback of a rank that goes on is held back; it may not be complete before
HOLD_OURS_S = 10.0  # the same for an error of hostring's: the rank that caused it may end later
LAST_BYTES_S = 1.0  # how long to wait for the end of a stream that an ended rank's own children may hold open

_OURS: Final = b"hostring.errors."  # begins the last line of a rank that failed because another one did
_BEGINNINGS: Final = (b"Traceback (most recent call last):", b"Fatal Python error: ", _OURS)
"""How tracebacks begin. A cause that was told by another rank has no frames: its line is the first."""


class Output:
    """Reads the ranks' streams in threads, and writes to this process's own.

    A traceback is held back until its rank has ended, or for `HOLD_S`, and then written in one piece.

    Args:
        prefix: put "[rank] " before each line. Lines then appear when they are complete.
    """

    def __init__(self, prefix: bool) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._streams: list[_Stream] = []

    def follow(self, rank: int, pipe: IO[bytes], target: Any, *, holds: bool) -> None:
        """Pass on what comes through `pipe`. `holds`: it is where tracebacks appear."""
        stream = _Stream(rank, target, f"[{rank}] ".encode() if self._prefix else b"", holds)
        self._streams.append(stream)
        name = f"hostring-output-{rank}"
        stream.reader = threading.Thread(target=self._read, args=(pipe, stream), name=name, daemon=True)
        stream.reader.start()

    def failed_because_of_another(self, rank: int) -> bool:
        """Whether an ended rank's last words are an error of hostring's, as when another rank is lost."""
        self._await(rank)
        with self._lock:
            return any(stream.last_line().startswith(_OURS) for stream in self._of(rank))

    def causes(self) -> list[int]:
        """Ranks with a traceback that is held back and is no error of hostring's, whether they have ended or not."""
        with self._lock:
            return [s.rank for s in self._of(None) if s.held and not s.last_line().startswith(_OURS)]

    def release(self, rank: int | None = None) -> None:
        """Write what is held back: of `rank`, or of all ranks in turn."""
        with self._lock:
            for stream in self._of(rank):
                stream.release()

    def release_late(self) -> None:
        """Write what has been held back long enough."""
        now = time.monotonic()
        with self._lock:
            for stream in self._of(None):
                hold = HOLD_OURS_S if stream.last_line().startswith(_OURS) else HOLD_S
                if stream.held and now - stream.since > hold:
                    stream.release()

    def close(self) -> None:
        """Write all that is left. Streams that another process holds open are not waited for."""
        for stream in list(self._streams):
            self._await(stream.rank)
        with self._lock:
            for stream in sorted(self._streams, key=lambda s: (s.last_line().startswith(_OURS), s.rank)):
                stream.release(rest=True)

    def _of(self, rank: int | None) -> list[_Stream]:
        return [s for s in sorted(self._streams, key=lambda s: s.rank) if rank in (None, s.rank)]

    def _await(self, rank: int) -> None:
        for stream in self._of(rank):
            if stream.reader is not None:
                stream.reader.join(LAST_BYTES_S)

    def _read(self, pipe: IO[bytes], stream: _Stream) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                with self._lock:
                    stream.take(data)
        with self._lock:
            stream.end()


@dataclass
class _Stream:
    """One stream of one rank. `held` are lines from a traceback's first on, `rest` is a line without its end."""

    rank: int
    target: Any
    prefix: bytes
    holds: bool
    held: list[bytes] = field(default_factory=list)
    since: float = 0.0
    rest: bytes = b""
    reader: threading.Thread | None = None

    def take(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._line(line + b"\n")
        if self.rest and not (self.prefix or self.held or self._may_begin_traceback()):
            self._write([self.rest])  # a progress bar, or a question
            self.rest = b""

    def end(self) -> None:
        """Nothing more will come."""
        if self.rest:
            self._line(self.rest + b"\n" if self.prefix or self.held else self.rest)
            self.rest = b""

    def release(self, rest: bool = False) -> None:
        if rest:
            self.end()
        held, self.held = self.held, []
        self._write(held)

    def last_line(self) -> bytes:
        """The line that names the exception: the last one that is not indented. Messages of several lines are."""
        unindented = [line for line in self.held if line[:1].strip()]
        return unindented[-1] if unindented else b""

    def _line(self, line: bytes) -> None:
        if self.holds and not self.held and line.lstrip(b" +|").startswith(_BEGINNINGS):
            self.since = time.monotonic()
            self.held.append(line)
        elif self.held:
            self.held.append(line)
        else:
            self._write([line])

    def _may_begin_traceback(self) -> bool:
        text = self.rest.lstrip(b" +|")
        return self.holds and any(words.startswith(text[: len(words)]) for words in _BEGINNINGS)

    def _write(self, lines: list[bytes]) -> None:
        if self.target is None or not lines:
            return
        data = b"".join(self.prefix + line for line in lines)
        binary = getattr(self.target, "buffer", None)
        self.target.flush()
        if binary is None:  # not a real stream, as in a notebook
            self.target.write(data.decode("utf-8", "replace"))
            self.target.flush()
        else:
            binary.write(data)
            binary.flush()
