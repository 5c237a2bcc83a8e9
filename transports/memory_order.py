"""The order in which two processes see each other's stores, and whether this machine keeps it as a shared ring needs.

The writer stores bytes, then the word that says how far it has written; the reader loads that word, then the bytes.
x86-64 keeps both in program order, an aligned 8-byte access is one access, and what C libraries copy with is fenced at
its end. 64-bit ARM may reorder, so a barrier stands between. Whether the other end sleeps is asked after the word is
stored: a store followed by a load needs a barrier on every machine.

Python has no barrier of its own, but releasing a lock and taking it again is one: on x86-64 because of its locked
instructions, on ARM because nothing passes a release and the acquire that follows it.
"""

from __future__ import annotations

import platform
import socket
import sys

_X86 = ("x86_64", "amd64")
_ARM = ("aarch64", "arm64")


def is_weak() -> bool:
    """Whether stores, or loads, of this machine may be reordered among themselves."""
    return platform.machine().lower() in _ARM


def unsupported() -> str:
    """Why this machine can't share rings of memory between processes; empty when it can."""
    machine = platform.machine().lower()
    if machine not in (*_X86, *_ARM) or sys.maxsize < 1 << 32:
        return (
            f"{machine} with {sys.maxsize.bit_length() + 1} bits is not known to order memory as a shared ring needs it"
        )
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket.socket, "sendmsg"):
        return f"{sys.platform} can't pass memory over a socket"
    return ""
