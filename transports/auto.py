"""Shared memory between ranks of one host, TCP between hosts: what hostring uses unless it is told otherwise."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from hostring.transports import memory_order, tcp, unix
from hostring.transports.addresses import Address, beside
from hostring.transports.link import Link, LinkKey
from hostring.transports.registry import Listener, Met

log = logging.getLogger("hostring")


def listen(hosts: Sequence[str], port: int) -> list[Listener]:
    """See `TransportModule`: TCP, and a UNIX socket beside it, since memory can only be passed over one of those."""
    return [*tcp.listen(hosts, port), *_listen_beside(port)]


def _listen_beside(port: int) -> list[Listener]:
    if memory_order.unsupported():
        return []
    name = beside(port)
    try:
        return [Listener(unix.listen_without_a_file(name[1:]), (name, 0))]
    except OSError as exc:
        log.info("hostring: this rank offers no shared memory: %s", exc)
        return []


def usable(address: Address) -> int | None:
    """See `TransportModule`: ways to shared memory come first."""
    if address[0].startswith("@"):
        return None if memory_order.unsupported() else 0
    return 1


def make_links(met: Met) -> dict[LinkKey, Link]:
    """See `TransportModule`. What can't share memory stays on its socket."""
    links: dict[LinkKey, Link] = {}
    if not memory_order.unsupported():
        from hostring.transports import sharing  # not on every platform

        links.update(sharing.share(sharing.worth_sharing(met.sockets), met.dialled, met.deadline))
    for (peer, kind), sock in met.sockets.items():
        if (peer, kind) not in links:
            near = sock.family == socket.AF_UNIX
            links[peer, kind] = unix.wrap(sock, peer) if near else tcp.wrap(sock, peer, kind)
    return links
