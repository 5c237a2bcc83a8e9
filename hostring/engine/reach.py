"""Whether it is this rank that is cut off: a host whose own cable is out would else blame another rank."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Collection, Mapping
from typing import Final

from hostring.transports.addresses import interfaces, is_loopback, own_host
from hostring.transports.link import Link

_SIOCGIFFLAGS: Final = 0x8913  # Linux: the flags of an interface
_TIOCOUTQ: Final = 0x5411  # Linux: bytes in a TCP socket's send queue that the other host has not acknowledged
_UP_AND_RUNNING: Final = 0x41


def far_hosts(links: Mapping[int, Link]) -> dict[int, str]:
    """The address of each peer on another host, by rank: those that a TCP link leads to, and not over loopback."""
    found = {}
    for peer, link in links.items():
        with contextlib.suppress(OSError, ValueError), _socket(link) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                host = str(sock.getpeername()[0])
                if not is_loopback(host) and host != own_host(sock):
                    found[peer] = host
    return found


def interface_down(links: Mapping[int, Link], far: Collection[int]) -> str | None:
    """The interfaces through which the links to `far` peers lead, when all are down; None when one is up or unknown."""
    down = set()
    for peer in far:
        with contextlib.suppress(OSError, ValueError), _socket(links[peer]) as sock:
            own = own_host(sock)
            name = next((i.name for i in interfaces() if i.host == own and i.name), None)
            if name is None or _is_up(name):
                return None
            down.add(name)
    return ", ".join(sorted(down)) or None


def unacknowledged(link: Link) -> bool:
    """Whether the other host has not acknowledged all bytes that were sent to it."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        answer = fcntl.ioctl(link.fileno(), _TIOCOUTQ, bytes(4))
    except (OSError, ValueError):
        return False
    return bool(struct.unpack("i", answer)[0])


def _is_up(name: str) -> bool:
    if sys.platform != "linux":
        return True
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode(), 0))
    flags: int = struct.unpack_from("16sH", answer)[1]
    return flags & _UP_AND_RUNNING == _UP_AND_RUNNING


def _socket(link: Link) -> socket.socket:
    """The socket of a link, over a descriptor of its own."""
    return socket.socket(fileno=os.dup(link.fileno()))
