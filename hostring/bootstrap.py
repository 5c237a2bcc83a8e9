"""Forms a group: the ranks find each other, check that they agree, and make their links."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hostring import rendezvous
from hostring.addresses import hosts_to_bind, is_loopback, numeric
from hostring.config import Config
from hostring.errors import HandshakeError, RendezvousError
from hostring.handshake import KINDS, PROTOCOL, Hello, compare_contracts
from hostring.link import Link
from hostring.member import Member, this_member
from hostring.message import pack, unpack
from hostring.rendezvous import Progress
from hostring.store import Store
from hostring.wiring import Address, Wire, Wiring

__all__ = ["Group", "Member", "connect"]

log = logging.getLogger("hostring")

Neighbours = Callable[[int, int], set[int]]
"""(rank, world_size) -> the ranks that `rank` needs data links with."""

Exchange = Callable[[bytes], list[bytes]]
"""Publishes this rank's bytes and returns those of all ranks, by rank."""

PAYLOAD_LIMIT = 1 << 16
TRANSPORTS = ("auto", "memory", "tcp", "unix")


@dataclass
class Group:
    """Ranks that have links with each other.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        name: the same on all ranks.
        epoch: 31 bits that differ from one start to the next, the same on all ranks.
        secret: what the links' hellos prove; new for every group.
        data, control, p2p: links by peer. Data links lead to the topology's neighbours, the others to every rank that
            this one can address.
        members: by rank; None for a rank that this one knows nothing of.
        store: shared with all ranks, where there is one.
    """

    rank: int
    world_size: int
    name: str
    epoch: int
    secret: bytes = field(repr=False)
    data: dict[int, Link] = field(default_factory=dict)
    control: dict[int, Link] = field(default_factory=dict)
    p2p: dict[int, Link] = field(default_factory=dict)
    members: list[Member | None] = field(default_factory=list)
    store: Store | None = None
    _config: Config = field(default_factory=Config, repr=False)
    _leave: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def links(self) -> list[Link]:
        """All links of all kinds."""
        return [*self.data.values(), *self.control.values(), *self.p2p.values()]

    def subgroup(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        neighbours: Neighbours,
        contract: Mapping[str, Any],
        exchange: Exchange,
        timeout: float | None = None,
    ) -> Group:
        """Form a group of some of these ranks, with links of its own.

        Args:
            name: the same on all its ranks, and of no other subgroup.
            rank: this rank's number in the subgroup.
            world_size: of the subgroup.
            neighbours: as in `connect`, in the subgroup's numbers.
            contract: as in `connect`.
            exchange: gathers bytes from all ranks of the subgroup, over this group's links.
            timeout: seconds; this group's when not given.
        """
        config = replace(
            self._config,
            rank=rank,
            world_size=world_size,
            name=f"{self.name}/{name}",
            secret=self.secret,
            timeout=self._config.timeout if timeout is None else timeout,
            store=None,
            ring=None,
        )
        return connect(config, neighbours=neighbours, contract=contract, exchange=exchange)

    def abort(self) -> None:
        """End all links now. Descriptors are given up by `close`, which must still be called."""
        for link in self.links:
            link.abort()

    def close(self) -> None:
        """Close all links and give up the store. Idempotent."""
        for link in self.links:
            link.close()
        while self._leave:
            self._leave.pop()()


@dataclass(frozen=True)
class _Entry:
    """What one rank publishes."""

    world_size: int
    nonce: bytes
    transport: str
    contract: Mapping[str, Any]
    member: Member

    def to_bytes(self) -> bytes:
        return pack(
            [PROTOCOL, self.world_size, self.nonce, self.transport, dict(self.contract), self.member.to_wire()],
            PAYLOAD_LIMIT,
        )

    @classmethod
    def from_bytes(cls, rank: int, data: bytes) -> _Entry:
        try:
            version, world_size, nonce, transport, contract, member = unpack(data)
            if version != PROTOCOL:
                raise HandshakeError(f"rank {rank} speaks version {version!r} of the protocol, this rank {PROTOCOL}; install one hostring")
            return cls(int(world_size), bytes(nonce), str(transport), dict(contract), Member.from_wire(member))
        except (ValueError, TypeError) as exc:
            raise HandshakeError(f"what rank {rank} published can't be read: {exc}") from exc


def connect(
    config: Config,
    *,
    neighbours: Neighbours,
    contract: Mapping[str, Any],
    exchange: Exchange | None = None,
) -> Group:
    """Form the group that `config` describes. All its ranks must call this.

    Args:
        config: see `Config`.
        neighbours: which ranks need data links; (rank, world_size) -> ranks. Made symmetric here.
        contract: what all ranks must agree on, as msgpack can hold it.
        exchange: carries the few bytes that the ranks have to know of each other; through the store when not given.

    Raises:
        HandshakeError: ranks disagree on the contract, the protocol or the world size.
        RendezvousError: a rank did not come, or can't be reached, within `config.timeout`; named in the message.
        ValueError: `config` can't be carried out.
    """
    if config.transport not in TRANSPORTS:
        raise ValueError(f"transport={config.transport!r} is none of {', '.join(TRANSPORTS)}")
    if not 0 <= config.rank < config.world_size:
        raise ValueError(f"rank {config.rank} is not in 0…{config.world_size - 1} (world_size {config.world_size})")
    with contextlib.ExitStack() as undo:
        forming = _Forming(config, neighbours, contract, undo)
        group = forming.alone() if config.world_size == 1 else forming.together(exchange)
        undo.pop_all()
        return group


class _Forming:
    """One call of `connect`. What is opened on the way is closed by `undo` unless all goes well."""

    def __init__(self, config: Config, neighbours: Neighbours, contract: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        self.config = config
        self.rank, self.world_size = config.rank, config.world_size
        self.neighbours = neighbours
        self.contract = contract
        self.undo = undo
        self.deadline = time.monotonic() + config.timeout
        self.progress = Progress(config.rank, self.deadline)
        self.transport = "tcp" if config.transport == "auto" else config.transport
        self.store: Store | None = None
        self.leave: list[Callable[[], None]] = []
        self.listeners: list[socket.socket] = []

    def alone(self) -> Group:
        """A world of one has no links and needs nobody."""
        return Group(0, 1, self.config.name, 0, os.urandom(32), members=[this_member([])], _config=self.config)

    def together(self, exchange: Exchange | None) -> Group:
        if exchange is None:
            exchange = self._through_store()
        addresses = self._listen()
        mine = _Entry(self.world_size, os.urandom(16), self.transport, self.contract, this_member(addresses))
        entries = self._table(exchange(mine.to_bytes()))
        nonces = b"".join(entry.nonce for entry in entries)
        identity = hashlib.sha256(b"group" + self.config.name.encode() + nonces).digest()
        secret = hashlib.sha256(b"secret" + self.config.secret + nonces).digest()
        group = Group(
            self.rank,
            self.world_size,
            self.config.name,
            int.from_bytes(identity[16:20], "little") >> 1,
            secret,
            members=[entry.member for entry in entries],
            store=self.store,
            _config=self.config,
            _leave=self.leave,
        )
        wires = self._wires()
        if self.transport == "memory":
            self._meet(group, identity, wires)
        else:
            self._wire(group, identity[:16], wires, entries)
        return group

    def _through_store(self) -> Exchange:
        store, close = rendezvous.open_store(self.config, self.deadline, self.progress)
        self.undo.callback(close)
        self.leave.append(close)
        self.store = store
        prefix = f"{self.config.name}/{self.config.restarts}"

        def exchange(payload: bytes) -> list[bytes]:
            return rendezvous.exchange(store, prefix, self.rank, self.world_size, payload, self.deadline, self.progress)

        return exchange

    def _listen(self) -> list[Address]:
        """Open this rank's listeners, before anybody is told of them."""
        if self.transport == "memory":
            return []
        transport = _transport(self.transport)
        if self.transport == "unix":
            sock, path = transport.listen()
            self.undo.callback(transport.remove, path)
            self.leave.append(lambda: transport.remove(path))
            self._own(sock)
            return [(path, 0)]
        addresses: list[Address] = []
        for host in self._hosts():
            bare, _, scope = host.partition("%")
            try:
                sock = transport.listen(bare, 0, scope_id=socket.if_nametoindex(scope) if scope else 0)
            except OSError as exc:
                log.info("hostring: rank %d can't listen on %s: %s", self.rank, host, exc)
                continue
            self._own(sock)
            addresses.append((host, sock.getsockname()[1]))
        if not addresses:
            raise RendezvousError(f"rank {self.rank} can listen on none of its addresses ({', '.join(self._hosts())})")
        return addresses

    def _own(self, sock: socket.socket) -> None:
        self.undo.callback(sock.close)
        self.listeners.append(sock)

    def _hosts(self) -> list[str]:
        local = getattr(self.store, "local_host", None)
        target = self.config.store_host
        loopback = is_loopback(local) if local else target is None or is_loopback(target)
        return hosts_to_bind(loopback=loopback, spec=self.config.interface, first=[local] if local else [])

    def _table(self, payloads: Sequence[bytes]) -> list[_Entry]:
        """Read what all ranks published, and refuse what can't work: every rank comes to the same conclusion."""
        entries = [_Entry.from_bytes(rank, payload) for rank, payload in enumerate(payloads)]
        mine = entries[self.rank]
        for rank, entry in enumerate(entries):
            compare_contracts(self.rank, self.contract, rank, entry.contract)
            for what, ours, theirs in (
                ("world_size", self.world_size, entry.world_size),
                ("transport", self.transport, entry.transport),
            ):
                if ours != theirs:
                    raise HandshakeError(f"{what} differs: rank {self.rank} has {ours!r}, rank {rank} has {theirs!r}")
            self._reachable(mine.member, rank, entry.member)
        return entries

    def _reachable(self, mine: Member, rank: int, theirs: Member) -> None:
        if self.transport == "memory" and (mine.host_id, mine.pid) != (theirs.host_id, theirs.pid):
            where = f"rank {rank} is process {theirs.pid} on {theirs.hostname}"
            raise HandshakeError(f"transport='memory' needs all ranks in one process; {where}")
        if mine.net_id == theirs.net_id:
            return
        where = f"rank {self.rank} is on {mine.hostname}, rank {rank} on {theirs.hostname}"
        if self.transport == "unix":
            raise HandshakeError(f"transport='unix' needs all ranks on one host; {where}")
        for member, who in ((mine, self.rank), (theirs, rank)):
            if member.addresses and all(is_loopback(host) for host, _ in member.addresses):
                raise RendezvousError(
                    f"{where}, but rank {who} offers only loopback addresses ({member.addresses[0][0]}), since the rendezvous address "
                    f"that it was given is one; give all ranks a MASTER_ADDR that other hosts can reach, or set HOSTRING_INTERFACE"
                )

    def _wires(self) -> list[Wire]:
        near = {r for r in range(self.world_size) if r in self.neighbours(self.rank, self.world_size)}
        near |= {r for r in range(self.world_size) if self.rank in self.neighbours(r, self.world_size)}
        others = [r for r in range(self.world_size) if r != self.rank]
        return [(peer, kind) for peer in others for kind in ("control", "data", "p2p") if kind != "data" or peer in near]

    def _meet(self, group: Group, identity: bytes, wires: Iterable[Wire]) -> None:
        memory = _transport("memory")
        for kind in KINDS:
            key = (identity, kind)
            self.undo.callback(memory.forget, key, self.rank)
            self.leave.append(lambda key=key: memory.forget(key, self.rank))  # type: ignore[misc]
        for peer, kind in wires:
            link = memory.meet((identity, kind), self.rank, peer)
            self.undo.callback(link.close)
            getattr(group, kind)[peer] = link

    def _wire(self, group: Group, identity: bytes, wires: Sequence[Wire], entries: Sequence[_Entry]) -> None:
        mine = entries[self.rank].member
        hello = Hello(identity, group.epoch, self.world_size, self.rank, KINDS[0], self.contract, mine)
        wiring = Wiring(
            hello=hello,
            secret=group.secret,
            dials=[wire for wire in wires if wire[0] < self.rank],
            accepts=[wire for wire in wires if wire[0] > self.rank],
            addresses={peer: _usable(mine, entries[peer].member) for peer in range(self.rank)},
            listeners=self.listeners,
            deadline=self.deadline,
            progress=self.progress,
        )
        transport = _transport(self.transport)
        for (peer, kind), sock in wiring.run().items():
            getattr(group, kind)[peer] = transport.wrap(sock, peer, self.config.timeout)
        for listener in self.listeners:
            listener.close()


def _usable(mine: Member, theirs: Member) -> list[Address]:
    """The addresses of `theirs` that this rank may try: loopback only when both share it."""
    same = mine.net_id == theirs.net_id
    return [(host, port) for host, port in theirs.addresses if same or not is_loopback(host) or numeric(host) is None]


def _transport(name: str) -> Any:
    return importlib.import_module(f"hostring.transports.{name}")

