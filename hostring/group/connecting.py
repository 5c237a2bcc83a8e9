"""Makes the sockets of one rank's links: dials and accepts until every link is there, or the deadline has passed."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hostring.errors import RendezvousError
from hostring.group.accepting import Acceptor
from hostring.group.dialing import Dialer
from hostring.group.greeting import Greeted
from hostring.group.handshake import Hello
from hostring.group.peers import Peers
from hostring.group.start import Start
from hostring.group.tasks import Tasks
from hostring.group.waiting import Waiting, names
from hostring.transports.addresses import Address
from hostring.transports.link import LinkKey


def connect_sockets(start: Start, peers: Peers) -> tuple[dict[LinkKey, socket.socket], dict[int, Hello]]:
    """Returns a connected socket for each link, and what each peer said in its hello.

    Raises:
        HandshakeError: a contract differs, or a peer refuses us for good.
        RendezvousError: the deadline passed; names the ranks without a link.
    """
    roster = peers.roster
    greeted = Greeted(roster.hello, roster.secret, {*peers.dials, *peers.accepts})
    Connecting(greeted, peers.dials, peers.accepts, peers.addresses, start.listeners).run(start.deadline, start.waiting)
    return greeted.sockets, greeted.hellos


@dataclass
class Connecting:
    """The work of one rank. See `Peers` for what it dials and accepts."""

    greeted: Greeted
    dials: Sequence[LinkKey]
    accepts: Sequence[LinkKey]
    addresses: Mapping[int, Sequence[Address]]
    listeners: Sequence[socket.socket]

    def run(self, deadline: float, waiting: Waiting) -> None:
        """Works in the calling thread. Leaves no socket behind if it fails."""
        greeted, tasks = self.greeted, Tasks()
        dialer, acceptor = Dialer(greeted, self.addresses, tasks), Acceptor(greeted, self.accepts, tasks)
        try:
            for listener in self.listeners:
                tasks.start(acceptor.accept_all(listener))
            for peer, kinds in _by_peer(self.dials).items():
                tasks.start(dialer.dial_all(peer, kinds))
            while greeted.missing and greeted.failure is None:
                now = time.monotonic()
                if now >= deadline:
                    raise RendezvousError(self._in_vain(), min(peer for peer, _ in greeted.missing))
                if waiting.until_due() <= 0:
                    waiting.tell(*self._state())
                tasks.turn(min(deadline, now + max(0.05, waiting.until_due())))
            if greeted.failure is not None:
                raise greeted.failure
        except BaseException:
            for sock in greeted.sockets.values():
                sock.close()
            raise
        finally:
            tasks.end()

    def _state(self) -> tuple[str, str]:
        peers = {peer for peer, _ in self.greeted.missing}
        return f"for links with {names(peers)}", "; ".join(self.greeted.tried(peers)[:3])

    def _in_vain(self) -> str:
        peers = {peer for peer, _ in self.greeted.missing}
        tried = self.greeted.tried(peers)
        why = f" ({'; '.join(tried)})" if tried else "; nobody dialled from there: is a firewall between the hosts?"
        return f"rank {self.greeted.hello.rank} has no link with {names(peers)} at the deadline{why}"


def _by_peer(keys: Sequence[LinkKey]) -> dict[int, list[str]]:
    kinds: dict[int, list[str]] = {}
    for peer, kind in keys:
        kinds.setdefault(peer, []).append(kind)
    return kinds
