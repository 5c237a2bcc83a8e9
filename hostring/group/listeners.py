"""Where the others can reach this rank: opens its listeners, and closes them when all have come."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Sequence

from hostring.errors import RendezvousError
from hostring.group.start import Start
from hostring.transports import unix
from hostring.transports.addresses import Address, is_loopback, listen

log = logging.getLogger("hostring")


def open_listeners(start: Start, hosts: Sequence[str], port: int = 0) -> list[Address]:
    """Listen on `hosts`, before anybody is told of it. Returns what to tell them.

    Raises:
        OSError, RendezvousError: this rank can listen nowhere.
    """
    if start.transport == "memory":
        return []
    if start.transport in ("unix", "shm"):
        sock, path = unix.listen()
        start.undo.callback(unix.remove, path)
        start.leave.callback(unix.remove, path)
        _own(start, sock)
        return [(path, 0)]
    reasons, near = [], _open_beside(start, port)
    for host in hosts:
        try:
            _own(start, listen(host, port))
        except OSError as exc:
            reasons.append(f"{host} port {port}: {exc}" if port else f"{host}: {exc}")
            log.info("hostring: rank %d can't listen on %s", start.rank, reasons[-1])
    bound = [sock.getsockname() for sock in start.listeners if isinstance(sock.getsockname(), tuple)]
    if not bound:
        raise RendezvousError(f"rank {start.rank} can listen on none of its addresses ({'; '.join(reasons)})")
    return [*((host, name[1]) for host in hosts for name in bound if name[0] == host.partition("%")[0]), *near]


def _open_beside(start: Start, port: int) -> list[Address]:
    """A second way in, for ranks of this host: memory can only be passed over a UNIX socket."""
    name = beside(port)
    if not start.shares:
        return []
    try:
        _own(start, unix.listen_without_a_file(name[1:]))
    except OSError as exc:
        log.info("hostring: rank %d offers no shared memory: %s", start.rank, exc)
        return []
    return [(name, 0)]


def beside(port: int) -> str:
    """The name of the UNIX socket beside a TCP listener; one that nobody can guess when the port is 0."""
    return f"@hostring-{port or os.urandom(8).hex()}"


def _own(start: Start, sock: socket.socket) -> None:
    start.undo.callback(sock.close)
    start.listeners.append(sock)


def warn_if_open(start: Start, hosts: Iterable[str]) -> None:
    """Tell the user when strangers can reach `hosts`, and no secret keeps them out."""
    if start.transport == "tcp" and not start.config.secret and not all(map(is_loopback, hosts)):
        log.warning(
            "hostring: rank %d listens on %s without a secret: whoever reaches it can pose as a rank; set HOSTRING_SECRET on all ranks",
            start.rank,
            ", ".join(hosts),
        )


def close_listeners(start: Start) -> None:
    for sock in start.listeners:
        name = sock.getsockname()
        if isinstance(name, str) and name:  # its file now, and not at the end: a killed rank would leave it
            unix.remove(name)
        sock.close()
