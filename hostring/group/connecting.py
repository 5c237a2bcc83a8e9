"""Makes the sockets of one rank's links: dials and accepts until every link is there, or the deadline has passed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hostring.errors import RendezvousError
from hostring.group.accepting import Acceptor
from hostring.group.dialing import Dialer
from hostring.group.greeting import Greeted
from hostring.group.handshake import Hello
from hostring.group.peers import Peers
from hostring.group.start import Start
from hostring.group.waiting import Waiting, names
from hostring.store.streams import accept_all, end
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
        """Works in a thread of its own, so that it doesn't matter whether the caller runs an event loop."""
        loop = asyncio.SelectorEventLoop()

        def work() -> None:
            try:
                loop.run_until_complete(self.main(deadline, waiting))
            except BaseException as exc:
                self.greeted.failure = self.greeted.failure or exc
            finally:
                loop.close()

        thread = threading.Thread(target=work, name="hostring-connecting", daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException as exc:  # Ctrl-C
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.greeted.fail, exc)
            thread.join()
            self.greeted.failure = exc
        if self.greeted.failure is not None:
            for sock in self.greeted.sockets.values():
                sock.close()
            raise self.greeted.failure

    async def main(self, deadline: float, waiting: Waiting) -> None:
        """Inside the event loop."""
        greeted = self.greeted
        dialer, acceptor = Dialer(greeted, self.addresses), Acceptor(greeted, self.accepts)
        with _accepting(self.listeners, acceptor):
            dialling = [asyncio.ensure_future(dialer.dial_all(*peer)) for peer in _by_peer(self.dials).items()]
            try:
                while greeted.missing and greeted.failure is None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise RendezvousError(self._in_vain(), min(peer for peer, _ in greeted.missing))
                    greeted.changed.clear()
                    with contextlib.suppress(asyncio.TimeoutError):
                        pause = min(left, 0.5, max(0.05, waiting.until_due()))
                        await asyncio.wait_for(greeted.changed.wait(), pause)
                    if greeted.missing:
                        waiting.tell(*self._state())
            finally:
                await end(dialling)
                await acceptor.end()
                await dialer.end()

    def _state(self) -> tuple[str, str]:
        peers = {peer for peer, _ in self.greeted.missing}
        return f"for links with {names(peers)}", "; ".join(self.greeted.tried(peers)[:3])

    def _in_vain(self) -> str:
        peers = {peer for peer, _ in self.greeted.missing}
        tried = self.greeted.tried(peers)
        why = f" ({'; '.join(tried)})" if tried else "; nobody dialled from there: is a firewall between the hosts?"
        return f"rank {self.greeted.hello.rank} has no link with {names(peers)} at the deadline{why}"


@contextlib.contextmanager
def _accepting(listeners: Sequence[socket.socket], acceptor: Acceptor) -> Iterator[None]:
    endings = [accept_all(listener, acceptor.accepted) for listener in listeners]
    try:
        yield
    finally:
        for end_accepting in endings:
            end_accepting()


def _by_peer(keys: Sequence[LinkKey]) -> dict[int, list[str]]:
    kinds: dict[int, list[str]] = {}
    for peer, kind in keys:
        kinds.setdefault(peer, []).append(kind)
    return kinds
