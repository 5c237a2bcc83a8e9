"""What every rank publishes before there are links, and what follows from having read it all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hostring.errors import HandshakeError, RendezvousError
from hostring.group.handshake import KINDS, PROTOCOL, Hello, compare_contracts
from hostring.group.peer_info import Member
from hostring.store.protocol import pack, typed, unpack
from hostring.transports.addresses import Address, is_loopback

PAYLOAD_LIMIT = 1 << 16


@dataclass(frozen=True)
class Entry:
    """One rank's part. `trouble` says why it can't take part after all; empty when it can."""

    rank: int
    world_size: int
    nonce: bytes
    transport: str
    contract: Mapping[str, Any]
    member: Member
    trouble: str = ""

    def to_bytes(self) -> bytes:
        """Raises: ValueError, when it is over the limit."""
        described = [dict(self.contract), self.member.to_wire(), self.trouble[:1000]]
        return pack([PROTOCOL, self.rank, self.world_size, self.nonce, self.transport, *described], PAYLOAD_LIMIT)

    @classmethod
    def from_bytes(cls, rank: int, data: bytes) -> Entry:
        """Raises: HandshakeError, when this is nothing that this version of hostring writes."""
        try:
            wire = unpack(data)
            if not isinstance(wire, list) or wire[0] != PROTOCOL:
                version = repr(wire[0])[:40] if isinstance(wire, list) and wire else "unknown"
                raise HandshakeError(
                    f"rank {rank} speaks protocol {version}, this rank {PROTOCOL}; install the same hostring", rank
                )
            return cls(
                rank=typed(wire, 1, int),
                world_size=typed(wire, 2, int),
                nonce=typed(wire, 3, bytes),
                transport=typed(wire, 4, str),
                contract=typed(wire, 5, dict),
                member=Member.from_wire(typed(wire, 6, dict)),
                trouble=typed(wire, 7, str),
            )
        except (ValueError, IndexError) as exc:
            raise HandshakeError(f"what rank {rank} published can't be read: {exc}", rank) from exc

    def check_place(self, rank: int, world_size: int) -> None:
        """Raises: HandshakeError, when this entry counts the ranks otherwise than rank `rank`."""
        if self.world_size != world_size:
            theirs = f"rank {self.rank} has {self.world_size}"
            raise HandshakeError(
                f"world_size differs: rank {rank} has {world_size}, {theirs}; give all ranks the same", self.rank
            )


@dataclass(frozen=True)
class Roster:
    """All entries, by rank; none where there is no store to read them from."""

    name: str
    given_secret: bytes
    mine: Entry
    entries: Sequence[Entry]

    @property
    def members(self) -> list[Member]:
        return [entry.member for entry in self.entries]

    @property
    def identity(self) -> bytes:
        """Names the group. With a store, also this very start of it."""
        return self._digest(b"group")[:16]

    @property
    def secret(self) -> bytes:
        """What only the ranks know: with a store, nobody who hasn't read all of it can compute this."""
        return self._digest(b"secret" + self.given_secret)

    @property
    def epoch(self) -> int:
        """31 bits that tell frames of this group from those of another; 0 where nothing tells two starts of one group apart."""
        return int.from_bytes(self._digest(b"epoch")[:4], "little") >> 1 if self.entries else 0

    def hello(self) -> Hello:
        """What this rank says on its links."""
        mine = self.mine
        return Hello(
            self.identity, mine.nonce, self.epoch, mine.world_size, mine.rank, KINDS[0], mine.contract, mine.member
        )

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
            entry.check_place(mine.rank, mine.world_size)
            compare_contracts(mine.rank, mine.contract, rank, entry.contract)
            if entry.transport != mine.transport:
                both = f"rank {mine.rank} has {mine.transport!r}, rank {rank} has {entry.transport!r}"
                raise HandshakeError(f"transport differs: {both}; give all ranks the same", rank)
            self._check_reachable(rank, entry.member)

    def addresses_of(self, peer: int) -> list[Address]:
        """Those of rank `peer` that this rank may try: loopback only when both share it."""
        mine, theirs = self.mine.member, self.entries[peer].member
        if mine.net_id == theirs.net_id:
            return theirs.addresses
        return [(_scoped(host, mine), port) for host, port in theirs.addresses if not is_loopback(host)]

    def _check_reachable(self, rank: int, theirs: Member) -> None:
        mine = self.mine.member
        if self.mine.transport == "memory" and (mine.host_id, mine.pid) != (theirs.host_id, theirs.pid):
            where = f"rank {rank} is process {theirs.pid} on {theirs.hostname}"
            raise HandshakeError(f"transport='memory' needs all ranks in one process; {where}", rank)
        if mine.net_id == theirs.net_id:
            return
        where = f"rank {self.mine.rank} is on {mine.hostname}, rank {rank} on {theirs.hostname}"
        if self.mine.transport in ("unix", "shm"):
            raise HandshakeError(f"transport={self.mine.transport!r} needs all ranks on one host; {where}", rank)
        for member, who in ((mine, self.mine.rank), (theirs, rank)):
            if member.addresses and all(is_loopback(host) for host, _ in member.addresses):
                raise RendezvousError(
                    f"{where}, but rank {who} offers only loopback addresses ({member.addresses[0][0]}), since the rendezvous address "
                    f"that it was given is one; give all ranks a MASTER_ADDR that other hosts can reach, or set HOSTRING_INTERFACE",
                    who,
                )

    def _digest(self, purpose: bytes) -> bytes:
        digest = hashlib.sha256(purpose + b"\0" + f"{self.name}\0{self.mine.world_size}".encode())
        for entry in self.entries:
            digest.update(entry.nonce)
        return digest.digest()


def _scoped(host: str, mine: Member) -> str:
    """A link-local address counts on the interface of whoever dials: take that of our own best link-local one."""
    bare, percent, _ = host.partition("%")
    scopes = [own.partition("%")[2] for own, _ in mine.addresses if "%" in own]
    return f"{bare}%{scopes[0]}" if percent and scopes else host
