"""Whether this host is the one that is cut off from the network. Without these checks, a host whose own cable is out
would blame another rank."""

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

_TIOCOUTQ: Final = 0x5411  # Linux: bytes in a TCP socket's send queue that the other host has not acknowledged


def far_hosts(links: Mapping[int, Link]) -> dict[int, str]:
    """The address of each peer that a TCP link reaches on another host, by rank."""
    found = {}
    for peer, link in links.items():
        with contextlib.suppress(OSError, ValueError), _socket(link) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                host = str(sock.getpeername()[0])
                if not is_loopback(host) and host != own_host(sock):
                    found[peer] = host
    return found


def lost_address(links: Mapping[int, Link], far: Collection[int]) -> str | None:
    """This host's address on the links to `far` peers, when it is on no interface that is up; else None.

    A lost carrier is no proof: both ends of a cable lose it.
    """
    there = interfaces()
    if not all(i.name for i in there):  # a system whose interfaces can't be listed
        return None
    lost = set()
    for peer in far:
        with contextlib.suppress(OSError, ValueError), _socket(links[peer]) as sock:
            own = own_host(sock)
            if own in {i.host for i in there}:
                return None
            lost.add(own)
    return ", ".join(sorted(lost)) or None


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


def _socket(link: Link) -> socket.socket:
    """The socket of a link, over a descriptor of its own."""
    return socket.socket(fileno=os.dup(link.fileno()))
