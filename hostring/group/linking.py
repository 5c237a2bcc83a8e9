"""Makes the links between ranks that know of each other: in memory, or on sockets once both ends have greeted."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

from hostring.errors import RendezvousError
from hostring.group.handshake import KINDS, Wire
from hostring.group.listeners import close_listeners
from hostring.group.peers import Peers
from hostring.group.rendezvous import names
from hostring.group.start import Start
from hostring.transports import memory, tcp, unix
from hostring.transports.link import Link


def link_in_memory(start: Start, peers: Peers) -> dict[Wire, Link]:
    """Links with all `peers`, which are threads of this process."""
    identity = peers.roster.identity
    links: dict[Wire, Link] = {}
    for kind in KINDS:
        start.leave.callback(memory.forget, (identity, kind), start.rank)
    for peer, kind in [*peers.dials, *peers.accepts]:
        links[peer, kind] = link = memory.meet((identity, kind), start.rank, peer)
        start.undo.callback(link.close)
    for kind in KINDS:  # a rank that left before its peers came would take what it had sent with it
        late = memory.unclaimed((identity, kind), start.rank, start.deadline - time.monotonic())
        if late:
            raise RendezvousError(f"rank {start.rank} has no link with {names(late)} at the deadline")
    return links


def link_by_sockets(start: Start, peers: Peers) -> dict[Wire, Link]:
    """Links with all `peers`, after which nobody else is listened to. Members that this rank knew nothing of say who they are."""
    from hostring.group.dialing import Wiring  # asyncio takes long to import, and a world of one doesn't need it

    roster, rank = peers.roster, start.rank
    wiring = Wiring(
        hello=roster.hello(),
        secret=roster.secret,
        dials=peers.dials,
        accepts=peers.accepts,
        addresses=peers.addresses,
        listeners=start.listeners,
        deadline=start.deadline,
        progress=start.progress,
    )
    sockets = wiring.run()
    for sock in sockets.values():
        start.undo.callback(sock.close)
    for peer, hello in wiring.hellos.items():
        peers.members[peer] = peers.members[peer] or hello.member
    shared, wrap = _share(start, sockets, peers), _wrapper(start, roster.secret)
    links: dict[Wire, Link] = {}
    for wire in sorted(sockets, key=lambda wire: (min(wire[0], rank), max(wire[0], rank), wire[1])):
        sock = sockets[
            wire
        ]  # in one order on all ranks: a wrapper that talks to its peer would wait in a circle otherwise
        if wire[1] == "control" and sock.family in (socket.AF_INET, socket.AF_INET6):
            tcp.watch(sock)
        links[wire] = shared.get(wire) or wrap(sock, wire[0])
    close_listeners(start)
    return links


def _share(start: Start, sockets: Mapping[Wire, socket.socket], peers: Peers) -> Mapping[Wire, Link]:
    """Links through shared memory, where there can be some. Control frames are few, and interrupt sleeps: they need none."""
    if not start.shares:
        return {}
    from hostring.transports import sharing  # not on every platform

    near = {wire: sock for wire, sock in sockets.items() if wire[1] != "control" and sock.family == socket.AF_UNIX}
    links = sharing.share(near, peers.dials, start.deadline)
    if start.transport == "shm" and (without := sorted({peer for peer, _ in near.keys() - links.keys()})):
        raise RendezvousError(
            f"rank {start.rank} can't share memory with {names(without)}; use transport='auto' or 'unix'", without[0]
        )
    return links


def _wrapper(start: Start, secret: bytes) -> Callable[[socket.socket, int], Link]:
    """What makes a greeted socket a link."""
    if start.config.transport == "tls":
        from hostring.transports import tls  # not everywhere either

        wrapper = tls.Wrapper(secret, start.rank)
        return lambda sock, peer: wrapper.wrap(sock, peer, start.deadline)
    return lambda sock, peer: (unix if sock.family == getattr(socket, "AF_UNIX", None) else tcp).wrap(sock, peer)
