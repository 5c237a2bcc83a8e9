"""UNIX-socket links, for ranks of one host."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile

from hostring.transports.tcp import SocketLink

PATH_LIMIT = 100
"""Bytes of a socket path that every system takes (sun_path holds 104 on macOS, 108 on Linux)."""


SEND_BUFFER = 4 << 20
"""Bytes; the kernel takes less where it is not allowed that much. UNIX sockets don't grow theirs, and Linux's 208 KiB cost half
the rate at 1 MiB messages (0.42 ms against 0.21 ms both ways at once)."""


def wrap(sock: socket.socket, peer: int) -> SocketLink:
    """Make a connected socket the link to `peer`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return SocketLink(sock, peer)


def listen(backlog: int = 1024) -> tuple[socket.socket, str]:
    """A non-blocking listening socket in a new directory that only this user can enter, and its path.

    `remove` the path once nobody dials any more.
    """
    folder = tempfile.mkdtemp(prefix="hostring-")
    if len(os.fsencode(folder)) > PATH_LIMIT - 2:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="hostring-", dir="/tmp")
    path = os.path.join(folder, "s")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        remove(path)
        raise
    return sock, path


def listen_without_a_file(name: str, backlog: int = 1024) -> socket.socket:
    """The same under a name that ends with the process and is seen where its loopback addresses are (Linux only).

    Raises:
        OSError: the name is taken, or the system has no such names.
    """
    if sys.platform != "linux":
        raise OSError(errno.EAFNOSUPPORT, f"{sys.platform} has no UNIX sockets without a file")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def remove(path: str) -> None:
    """Delete the socket file and its directory."""
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)
