"""Where prompts come from: those that were given, then the lines of a stream, which may take their time."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Sequence

_CHUNK = 1 << 16


class Prompts:
    """The prompts of one run, in order. Lines without text are passed over.

    Args:
        given: come first.
        fd: a descriptor to read lines from after that, until its end. Read directly: a buffered reader of the same
            descriptor would hold lines that nobody sees here.

    Attributes:
        interactive: a person types.
    """

    def __init__(self, given: Sequence[str], fd: int | None = None) -> None:
        self._given = deque(given)
        self._fd = fd
        self._received = b""
        self.interactive = fd is not None and os.isatty(fd)

    @property
    def more(self) -> bool:
        """Whether another may come. Never waits, so what is still open may turn out to hold nothing more."""
        while not self._given and self._fd is not None:
            if self._line() is None and not self._read(0.0):
                return True
        return bool(self._given)

    def next(self, seconds: float) -> str | None:
        """The next one, None when none has come within about `seconds`.

        Raises:
            EOFError: there are no more.
        """
        while not self._given:
            if self._fd is None:
                raise EOFError
            if self._line() is None and not self._read(seconds):
                return None
        return self._given.popleft()

    def _line(self) -> str | None:
        """Take one whole line from what has been received; None when there is none."""
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        return self._give(line)

    def _give(self, line: bytes) -> str:
        text = line.decode(errors="replace").strip()
        if text:
            self._given.append(text)
        return text

    def _read(self, seconds: float) -> bool:
        """Receive more, or notice the end. False when neither happened within `seconds`."""
        assert self._fd is not None
        try:
            if not select.select([self._fd], [], [], seconds)[0]:
                return False
            chunk = os.read(self._fd, _CHUNK)
        except (OSError, ValueError):  # closed, or never open
            chunk = b""
        self._received += chunk
        if not chunk:
            self._fd = None
            self._give(self._received)
        return True
