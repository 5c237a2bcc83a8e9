"""What follows from the entries of all ranks: whether they fit together, the group's secret, who to dial where."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from hostring.errors import HandshakeError, RendezvousError
from hostring.group.handshake import KINDS, Hello, compare_contracts
from hostring.group.peer_info import Entry, PeerInfo
from hostring.transports.addresses import Address, is_loopback


@dataclass
class Roster:
    """All entries, by rank; none if there is no store to read them from.

    Attributes:
        identity: names the group. With a store, also this very start of it.
        secret: known to the ranks only. With a store, nobody who hasn't read all of it can compute this.
        hello: what this rank says on its links.
        epoch: 31 bits that tell frames of this group from those of another; 0 if nothing tells two starts of it apart.
    """

    name: str
    given_secret: bytes
    mine: Entry
    entries: Sequence[Entry]

    def __post_init__(self) -> None:
        self.identity = self._digest(b"group")[:16]
        self.secret = self._digest(b"secret" + self.given_secret)
        self.epoch = int.from_bytes(self._digest(b"epoch")[:4], "little") >> 1 if self.entries else 0
        m = self.mine
        self.hello = Hello(self.identity, m.nonce, m.world_size, m.rank, KINDS[0], m.contract, m.info)

    def check(self) -> None:
        """Refuse what can't work. Every rank comes to the same conclusion.

        Raises:
            HandshakeError: the ranks don't agree.
            RendezvousError: they can't reach each other.
        """
        mine = self.mine
        for rank, entry in enumerate(self.entries):
            if entry.trouble:
                raise RendezvousError(f"rank {rank} can't take part: {entry.trouble}", rank)
            if entry.rank != rank:
                raise HandshakeError(f"rank {entry.rank} published itself as rank {rank}", rank)
            compare_contracts(mine.rank, mine.contract, rank, entry.contract)
            if entry.transport != mine.transport:
                both = f"rank {mine.rank} has {mine.transport!r}, rank {rank} has {entry.transport!r}"
                raise HandshakeError(f"transport differs: {both}; give all ranks the same", rank)
            self._check_reachable(rank, entry.info)

    def addresses_of(self, peer: int) -> list[Address]:
        """Those of rank `peer` that this rank may try: loopback only if both share it."""
        mine, theirs = self.mine.info, self.entries[peer].info
        if mine.net_id == theirs.net_id:
            return theirs.addresses
        return [(_scoped(host, mine), port) for host, port in theirs.addresses if not is_loopback(host)]

    def _check_reachable(self, rank: int, theirs: PeerInfo) -> None:
        mine = self.mine.info
        if self.mine.transport == "memory" and (mine.host_id, mine.pid) != (theirs.host_id, theirs.pid):
            where = f"rank {rank} is process {theirs.pid} on {theirs.hostname}"
            raise HandshakeError(f"transport='memory' needs all ranks in one process; {where}", rank)
        if mine.net_id == theirs.net_id:
            return
        where = f"rank {self.mine.rank} is on {mine.hostname}, rank {rank} on {theirs.hostname}"
        if self.mine.transport in ("unix", "shm"):
            raise HandshakeError(f"transport={self.mine.transport!r} needs all ranks on one host; {where}", rank)
        for info, who in ((mine, self.mine.rank), (theirs, rank)):
            if info.addresses and all(is_loopback(host) for host, _ in info.addresses):
                raise RendezvousError(
                    f"{where}, but rank {who} offers only loopback addresses ({info.addresses[0][0]}), since the "
                    f"rendezvous address that it was given is one; give all ranks a MASTER_ADDR that other hosts can "
                    f"reach, or set HOSTRING_INTERFACE",
                    who,
                )

    def _digest(self, purpose: bytes) -> bytes:
        digest = hashlib.sha256(purpose + b"\0" + f"{self.name}\0{self.mine.world_size}".encode())
        for entry in self.entries:
            digest.update(entry.nonce)
        return digest.digest()


def _scoped(host: str, mine: PeerInfo) -> str:
    """A link-local address needs an interface of the host that dials: take that of our own best link-local address."""
    bare, percent, _ = host.partition("%")
    scopes = [own.partition("%")[2] for own, _ in mine.addresses if "%" in own]
    return f"{bare}%{scopes[0]}" if percent and scopes else host
