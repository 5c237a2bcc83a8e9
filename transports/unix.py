"""UNIX-socket links, for ranks of one host."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial

from hostring.transports.addresses import Address
from hostring.transports.link import LinkKey
from hostring.transports.registry import Listener, Met
from hostring.transports.tcp import SocketLink

MAX_PATH_BYTES = 100
"""Every system takes a socket path of this length (sun_path holds 104 bytes on macOS, 108 on Linux)."""

SEND_BUFFER_BYTES = 4 << 20
"""The kernel may give less. UNIX sockets don't grow their buffer, and Linux's 208 KiB halve the rate of 1 MiB messages
(0.42 ms against 0.21 ms both ways at once)."""


def wrap(sock: socket.socket, peer: int) -> SocketLink:
    """Make a connected socket the link to `peer`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return SocketLink(sock, peer)


def listen_at_new_path(backlog: int = 1024) -> tuple[socket.socket, str]:
    """A non-blocking listening socket in a new directory that only this user can enter, and its path.

    `remove` the path once nobody dials any more.
    """
    import tempfile  # with bz2, lzma and random, which links to other hosts don't need

    folder = tempfile.mkdtemp(prefix="hostring-")
    if len(os.fsencode(folder)) > MAX_PATH_BYTES - 2:
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
    import shutil

    shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def unsupported() -> str:
    """See `TransportModule`."""
    return "" if hasattr(socket, "AF_UNIX") else f"{sys.platform} has no UNIX sockets"


def listen(hosts: Sequence[str], port: int) -> list[Listener]:
    """See `TransportModule`. A path takes the place of hosts and port."""
    sock, path = listen_at_new_path()
    return [Listener(sock, (path, 0), partial(remove, path))]


def usable(address: Address) -> int | None:
    """See `TransportModule`."""
    return 0 if address[0].startswith("/") else None


def make_links(met: Met) -> dict[LinkKey, SocketLink]:
    """See `TransportModule`."""
    return {key: wrap(sock, key[0]) for key, sock in met.sockets.items()}
