"""Makes the links between ranks that know of each other."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from hostring.group.peers import Peers
from hostring.group.start import Start
from hostring.transports.link import Link, LinkKey
from hostring.transports.registry import Met


def make_links(start: Start, peers: Peers) -> Mapping[LinkKey, Link]:
    """Links with all `peers`. Nobody else is listened to after that. Fills in the infos that this rank did not have."""
    sockets: dict[LinkKey, socket.socket] = {}
    if start.row.reach != "process":
        from hostring.group.connecting import connect_sockets  # asyncio takes long to import; memory doesn't need it

        sockets, hellos = connect_sockets(start, peers)
        for sock in sockets.values():
            start.undo.callback(sock.close)
        for peer, hello in hellos.items():
            peers.infos[peer] = peers.infos[peer] or hello.info
    roster = peers.roster
    met = Met(
        keys=[*peers.dials, *peers.accepts],
        sockets=sockets,
        dialled=peers.dials,
        rank=start.rank,
        identity=roster.identity,
        secret=roster.secret,
        deadline=start.deadline,
        leave=start.leave,
    )
    links = start.transport.make_links(met)
    start.listening.close()
    return links
