"""A mapping of shared memory: one page of words, then a ring of bytes for each direction.

It has no name that could outlive its users.

A word has 8 bytes and one writer, and a cache line of its own, or rather two, since CPUs fetch them in pairs.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

PAGE: Final = 4096

CAPACITY: Final = 1 << 21
"""Bytes of a ring. Measured from 256 KiB to 4 MiB: below 1 MiB large messages lose, above 2 MiB little is won."""

WRITTEN: Final = 0  # bytes ever written, by the writer
READ: Final = 16  # bytes ever read, by the reader
READER_SLEEPS: Final = 32  # set by the reader, cleared by the writer when it rings
WRITER_SLEEPS: Final = 48  # the reverse
DIRECTION: Final = 128  # words from one direction's to the other's

NONCE: Final = 24
NONCES: Final = (PAGE - 64, PAGE - 32)  # where each side proves itself


def create(nbytes: int) -> int:
    """A descriptor of `nbytes` zeros of memory without a name.

    Raises:
        OSError: the system has none to give.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hostring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:  # a Python that was built on an old system, or macOS
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        import tempfile

        with tempfile.TemporaryFile(dir=folder) as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
        if hasattr(os, "memfd_create"):  # nobody can shorten it under the other one's feet
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        elif hasattr(os, "posix_fallocate"):  # a full file system shall say so now
            os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd
