"""Forms a group: the ranks find each other, check that they agree, and make their links."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hostring.addresses import Address, any_host, hosts_to_bind, is_here, is_loopback, listen, resolve
from hostring.config import Config, Ring
from hostring.elastic import Regrouping, Seat
from hostring.errors import RendezvousError
from hostring.handshake import KINDS, Hello
from hostring.hosting import open_store
from hostring.link import Link
from hostring.member import Member, this_member
from hostring.rendezvous import Progress, exchange, linger, names
from hostring.roster import Entry, Roster
from hostring.store import Store

__all__ = ["Group", "Member", "connect"]

log = logging.getLogger("hostring")

Neighbours = Callable[[int, int], set[int]]
"""(rank, world_size) -> the ranks that `rank` needs data links with."""

LAST_SECONDS = 2.0
"""Seconds that the links of a rebuilt group get when its members were found at the last moment."""

Wire = tuple[int, str]
"""(peer, kind) of a link."""

Exchange = Callable[[bytes], list[bytes]]
"""Publishes this rank's bytes and returns those of all ranks, by rank."""

TRANSPORTS = ("auto", "memory", "shm", "tcp", "tls", "unix")


@dataclass
class Group:
    """Ranks that have links with each other.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        name: the same on all ranks.
        epoch: 31 bits, the same on all ranks, that differ from one start to the next; 0 in a ring without a store.
        secret: what the links' hellos prove; where there is a store, it is new for every start.
        data, control, p2p: links by peer. Data links lead to the topology's neighbours, the others to every rank that
            this one can address.
        members: by rank; None for a rank that this one knows nothing of.
        store: shared with all ranks, where there is one.
        hosts: addresses of this host at which the others can reach it, best first.
        generation: how often a rebuilding was tried.
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
    hosts: list[str] = field(default_factory=list)
    generation: int = 0
    _config: Config = field(default_factory=Config, repr=False)
    _leave: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    _linked: bool = True

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
            exchange: gathers bytes from all ranks of the subgroup, over this group's links. Called exactly once.
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
        return connect(config, neighbours=neighbours, contract=contract, exchange=exchange, hosts=self.hosts)

    def check_store(self) -> Store:
        """Raises: ValueError, when this group has no store and can't be rebuilt."""
        if self.store is None:
            raise ValueError("this group has no store for ranks to find each other again; rebuild the group that it was split from")
        return self.store

    def reform(
        self, survivors: Callable[[], int], *, min_ranks: int, timeout: float, neighbours: Neighbours, contract: Mapping[str, Any]
    ) -> Group:
        """Form the next generation of this group, with whoever is left and whoever came back. This one's links are closed.

        Args:
            survivors: how many other ranks of this group are known to be alive.
            min_ranks, timeout, neighbours, contract: as in `Comm.rebuild` and `connect`.
        """
        store = self.check_store()
        known = survivors if self._linked else None
        deadline = time.monotonic() + timeout
        regrouping = Regrouping(store, self.name, self.rank, min_ranks, known, deadline, self.world_size)
        seat = regrouping.survive(self.generation + 1)
        self.generation = seat.generation  # should its links not come about, the next try must not find what this one left
        for link in self.links:
            link.close()
        self._linked = False
        group = _seated(self._config, store, seat, neighbours, contract, deadline)
        group._leave.callback(self._leave.pop_all().close)
        return group

    def abort(self) -> None:
        """End all links now. Descriptors are given up by `close`, which must still be called."""
        for link in self.links:
            link.abort()

    def close(self) -> None:
        """Close all links and give up the store. Idempotent."""
        for link in self.links:
            link.close()
        self._leave.close()


def connect(
    config: Config,
    *,
    neighbours: Neighbours,
    contract: Mapping[str, Any],
    exchange: Exchange | None = None,
    hosts: Sequence[str] | None = None,
) -> Group:
    """Form the group that `config` describes. All its ranks must call this.

    Args:
        config: see `Config`.
        neighbours: which ranks need data links; (rank, world_size) -> ranks. Made symmetric here.
        contract: what all ranks must agree on, as msgpack can hold it.
        exchange: carries the few bytes that the ranks have to know of each other; through the store when not given.
        hosts: where to listen, when that is known from another group.

    Raises:
        HandshakeError: ranks disagree on the contract, the protocol or the world size.
        RendezvousError: a rank did not come, or can't be reached, within `config.timeout`; named in the message.
        ValueError: `config` can't be carried out.
    """
    if config.transport not in TRANSPORTS:
        raise ValueError(f"transport={config.transport!r} is none of {', '.join(TRANSPORTS)}")
    if config.transport in ("shm", "tls") and (why := _transport(config.transport).unsupported()):
        raise ValueError(f"transport={config.transport!r}: {why}; use transport='{'auto' if config.transport == 'shm' else 'tcp'}'")
    if config.transport == "tls" and not config.secret:
        raise ValueError("transport='tls' needs a secret to derive its key from: set HOSTRING_SECRET, or join by token")
    if not 0 <= config.rank < config.world_size:
        raise ValueError(f"rank {config.rank} is not in 0…{config.world_size - 1} (world_size {config.world_size})")
    if config.ring is not None and config.transport not in ("auto", "tcp", "tls"):
        raise ValueError(f"RING_CONFIG gives TCP addresses, which transport={config.transport!r} has no use for")
    with contextlib.ExitStack() as undo:
        forming = _Forming(config, neighbours, contract, undo)
        if config.ring is not None and config.world_size > 1:
            group = forming.ring(config.ring)
        elif config.world_size > 1:
            group = forming.together(exchange or forming.through_store(), hosts)
        else:
            group = forming.alone(exchange)
        undo.pop_all()
        return group


def rejoin(config: Config, *, neighbours: Neighbours, contract: Mapping[str, Any]) -> Group:
    """Come back into a group whose survivors rebuild it. `config` is that of a first start; its rank is the one asked for.

    Raises:
        RendezvousError: nobody rebuilt the group within `config.timeout`.
    """
    deadline = time.monotonic() + config.timeout
    with contextlib.ExitStack() as undo:
        store, leave = open_store(config, deadline, Progress(config.rank, deadline))
        undo.callback(leave)
        seat = Regrouping(store, config.name, config.rank, 1, lambda: 0, deadline, config.world_size).come_back()
        group = _seated(config, store, seat, neighbours, contract, deadline)
        group._leave.callback(undo.pop_all().close)
        return group


def _seated(
    config: Config, store: Store, seat: Seat, neighbours: Neighbours, contract: Mapping[str, Any], deadline: float
) -> Group:
    """Connect as `seat` says, by `deadline` or in a moment after it: whoever has a seat is waited for by the others."""
    first = config.restarts.partition("+")[0]
    again = replace(config, rank=seat.rank, world_size=seat.world_size, store=store, restarts=f"{first}+{seat.generation}")
    left = max(deadline - time.monotonic(), LAST_SECONDS)
    group = connect(replace(again, timeout=left), neighbours=neighbours, contract=contract)
    group.store, group.generation, group._config = store, seat.generation, again
    return group


class _Forming:
    """One call of `connect`. What is opened on the way is closed by `undo` unless all goes well, then by `leave`."""

    def __init__(self, config: Config, neighbours: Neighbours, contract: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        self.config = config
        self.rank, self.world_size = config.rank, config.world_size
        self.neighbours = neighbours
        self.contract = {**contract, "encrypted": config.transport == "tls"}
        self.transport = "tcp" if config.transport in ("auto", "tls") else config.transport
        self.shares = config.transport in ("auto", "shm") and not _transport("shm").unsupported()
        self.deadline = time.monotonic() + config.timeout
        self.progress = Progress(config.rank, self.deadline)
        self.store: Store | None = None
        self.listeners: list[socket.socket] = []
        self.undo = undo
        self.leave = contextlib.ExitStack()
        undo.callback(self.leave.close)

    def alone(self, exchange: Exchange | None) -> Group:
        """A world of one has no links and needs nobody."""
        if exchange is not None:
            exchange(b"")
        return Group(0, 1, self.config.name, 0, os.urandom(32), members=[this_member([])], _config=self.config)

    def together(self, exchange: Exchange, hosts: Sequence[str] | None) -> Group:
        """All ranks learn all addresses, then every pair makes its links."""
        hosts = list(hosts or self._hosts())
        trouble: Exception | None = None
        addresses: list[Address] = []
        try:
            addresses = self._listen(hosts)
        except (OSError, RendezvousError) as exc:  # the others must hear of it: they are about to gather
            trouble = exc
        mine = Entry(self.rank, self.world_size, os.urandom(16), self.transport, self.contract, this_member(addresses), str(trouble or ""))
        entries = [Entry.from_bytes(rank, payload) for rank, payload in enumerate(exchange(mine.to_bytes()))]
        roster = Roster(self.config.name, self.config.secret, mine, entries)
        if trouble is not None:
            raise trouble
        roster.check()
        self.progress.next_phase()
        if isinstance(getattr(self.store, "deadline", None), float):
            self.store.deadline = 0.0  # type: ignore[union-attr]
        group = self._group(roster.epoch, roster.secret, list(roster.members), hosts)
        if self.transport == "memory":
            self._meet(group, roster.identity)
        else:
            self._warn_if_open(hosts, self.rank == 0)
            dials = {peer: self._preferred(roster.addresses_of(peer)) for peer in range(self.rank)}
            self._wire(group, roster.hello(group.epoch), self._wires(), dials)
        return group

    def ring(self, ring: Ring) -> Group:
        """Each rank waits for its left neighbour and dials its right one; what they know of each other comes with the hello."""
        n, right, left = self.world_size, (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        addresses = [(host, ring.right_port) for host in resolve(ring.right_ip)]
        if not addresses:
            raise RendezvousError(f"rank {self.rank}: right_ip {ring.right_ip!r} of RING_CONFIG can't be resolved")
        near = is_loopback(ring.right_ip) and (ring.master_ip is None or is_loopback(ring.master_ip))
        hosts = hosts_to_bind(loopback=near, spec=self.config.interface)
        self._listen(hosts if near or self.config.interface else [any_host()], ring.port)
        self._warn_if_open(hosts, True)
        members: list[Member | None] = [None] * n
        members[self.rank] = mine = this_member([(host, ring.port) for host in hosts])
        alone = Entry(self.rank, n, os.urandom(16), self.transport, self.contract, mine)
        roster = Roster(self.config.name, self.config.secret, alone, [])
        group = self._group(0, roster.secret, members, hosts)
        wires = [(peer, kind) for peer in {left, right} for kind in KINDS]
        if n == 2:  # both could dial; one direction is enough, and there must not be two links of a kind
            dials, accepts = (wires, []) if self.rank == 1 else ([], wires)
        else:
            dials, accepts = [wire for wire in wires if wire[0] == right], [wire for wire in wires if wire[0] == left]
        if is_here(ring.right_ip):
            addresses.append((_beside(ring.right_port), 0))
        for peer, hello in self._wire(group, roster.hello(0), wires, {right: self._preferred(addresses)}, dials, accepts).items():
            members[peer] = hello.member
        return group

    def through_store(self) -> Exchange:
        """Use the store that the configuration names."""
        store, close = open_store(self.config, self.deadline, self.progress)
        self.leave.callback(close)
        self.store = store
        prefix = f"{self.config.name}/{self.config.restarts}"
        if self.config.rank == 0 and self.config.hosts_store and self.config.store is None:
            self.undo.callback(linger, store, prefix, self.world_size)

        def through(payload: bytes) -> list[bytes]:
            return exchange(store, prefix, self.rank, self.world_size, payload, self.deadline, self.progress, inspect)

        me = this_member([])

        def inspect(rank: int, payload: bytes) -> None:
            entry = Entry.from_bytes(rank, payload)
            entry.check_place(self.rank, self.world_size)
            if rank < self.rank and entry.member.host_id == me.host_id:
                self.progress.speaks = False  # one line per host is enough

        return through

    def _group(self, epoch: int, secret: bytes, members: list[Member | None], hosts: list[str]) -> Group:
        return Group(
            self.rank,
            self.world_size,
            self.config.name,
            epoch,
            secret,
            members=members,
            store=self.store,
            hosts=hosts,
            _config=self.config,
            _leave=self.leave,
        )

    def _hosts(self) -> list[str]:
        if self.transport != "tcp":
            return ["127.0.0.1"]
        local = getattr(self.store, "local_host", None)
        target = self.config.store_host
        loopback = (is_loopback(local) if local else True) and (target is None or is_loopback(target))
        return hosts_to_bind(loopback=loopback, spec=self.config.interface, first=[local] if local else [])

    def _listen(self, hosts: Sequence[str], port: int = 0) -> list[Address]:
        """Open this rank's listeners, before anybody is told of them."""
        if self.transport == "memory":
            return []
        if self.transport in ("unix", "shm"):
            unix = _transport("unix")
            sock, path = unix.listen()
            self.undo.callback(unix.remove, path)
            self.leave.callback(unix.remove, path)
            self._own(sock)
            return [(path, 0)]
        reasons, near = [], self._listen_near(port)
        for host in hosts:
            try:
                self._own(listen(host, port))
            except OSError as exc:
                reasons.append(f"{host} port {port}: {exc}" if port else f"{host}: {exc}")
                log.info("hostring: rank %d can't listen on %s", self.rank, reasons[-1])
        bound = [sock.getsockname() for sock in self.listeners if isinstance(sock.getsockname(), tuple)]
        if not bound:
            raise RendezvousError(f"rank {self.rank} can listen on none of its addresses ({'; '.join(reasons)})")
        return [*((host, name[1]) for host in hosts for name in bound if name[0] == host.partition("%")[0]), *near]

    def _listen_near(self, port: int) -> list[Address]:
        """A second way in, for ranks of this host: memory can only be passed over a UNIX socket."""
        name = _beside(port)
        if not self.shares:
            return []
        try:
            self._own(_transport("unix").listen_without_a_file(name[1:]))
        except OSError as exc:
            log.info("hostring: rank %d offers no shared memory: %s", self.rank, exc)
            return []
        return [(name, 0)]

    def _preferred(self, addresses: Sequence[Address]) -> list[Address]:
        """Ways to shared memory come first, unless this rank wants none."""
        near = [address for address in addresses if address[0].startswith("@")]
        return [*(near if self.shares else []), *(address for address in addresses if address not in near)]

    def _own(self, sock: socket.socket) -> None:
        self.undo.callback(sock.close)
        self.listeners.append(sock)

    def _warn_if_open(self, hosts: Iterable[str], speaks: bool) -> None:
        if speaks and self.transport == "tcp" and not self.config.secret and not all(map(is_loopback, hosts)):
            log.warning(
                "hostring: rank %d listens on %s without a secret: whoever reaches it can pose as a rank; set HOSTRING_SECRET on all ranks",
                self.rank,
                ", ".join(hosts),
            )

    def _wires(self) -> list[Wire]:
        near = {r for r in range(self.world_size) if r in self.neighbours(self.rank, self.world_size)}
        near |= {r for r in range(self.world_size) if self.rank in self.neighbours(r, self.world_size)}
        others = [r for r in range(self.world_size) if r != self.rank]
        return [(peer, kind) for peer in others for kind in ("control", "data", "p2p") if kind != "data" or peer in near]

    def _meet(self, group: Group, identity: bytes) -> None:
        memory = _transport("memory")
        for kind in KINDS:
            self.leave.callback(memory.forget, (identity, kind), self.rank)
        for peer, kind in self._wires():
            link = memory.meet((identity, kind), self.rank, peer)
            self.undo.callback(link.close)
            getattr(group, kind)[peer] = link
        for kind in KINDS:  # a rank that left before its peers came would take what it had sent with it
            late = memory.unclaimed((identity, kind), self.rank, self.deadline - time.monotonic())
            if late:
                raise RendezvousError(f"rank {self.rank} has no link with {names(late)} at the deadline")

    def _wire(
        self,
        group: Group,
        hello: Hello,
        wires: Sequence[Wire],
        addresses: Mapping[int, Sequence[Address]],
        dials: Sequence[Wire] | None = None,
        accepts: Sequence[Wire] | None = None,
    ) -> dict[int, Hello]:
        from hostring.wiring import Wiring  # asyncio takes long to import, and a world of one doesn't need it

        wiring = Wiring(
            hello=hello,
            secret=group.secret,
            dials=[wire for wire in wires if wire[0] < self.rank] if dials is None else dials,
            accepts=[wire for wire in wires if wire[0] > self.rank] if accepts is None else accepts,
            addresses=addresses,
            listeners=self.listeners,
            deadline=self.deadline,
            progress=self.progress,
        )
        sockets = wiring.run()
        for sock in sockets.values():
            self.undo.callback(sock.close)
        shared = self._share(sockets, wiring.dials)
        wrap = self._wrap(group.secret)
        for wire in sorted(sockets, key=lambda wire: (min(wire[0], self.rank), max(wire[0], self.rank), wire[1])):
            sock = sockets[wire]  # in one order on all ranks: a wrapper that talks to its peer would wait in a circle otherwise
            if wire[1] == "control" and sock.family in (socket.AF_INET, socket.AF_INET6):
                _transport("tcp").watch(sock)
            getattr(group, wire[1])[wire[0]] = shared.get(wire) or wrap(sock, wire[0])
        for listener in self.listeners:
            name = listener.getsockname()
            if isinstance(name, str) and name:  # its file now, and not at the end: a killed rank would leave it
                _transport("unix").remove(name)
            listener.close()
        return wiring.hellos

    def _wrap(self, secret: bytes) -> Callable[[socket.socket, int], Link]:
        """What makes a greeted socket a link."""
        if self.config.transport == "tls":
            wrapper = _transport("tls").Wrapper(secret, self.rank)
            return lambda sock, peer: wrapper.wrap(sock, peer, self.deadline)

        def plain(sock: socket.socket, peer: int) -> Link:
            name = "unix" if sock.family == getattr(socket, "AF_UNIX", None) else "tcp"
            link: Link = _transport(name).wrap(sock, peer)
            return link

        return plain

    def _share(self, sockets: Mapping[Wire, socket.socket], dialled: Sequence[Wire]) -> dict[Wire, Link]:
        """Links through shared memory, where there can be some. Control frames are few, and interrupt sleeps: they need none."""
        if not self.shares:
            return {}
        near = {wire: sock for wire, sock in sockets.items() if wire[1] != "control" and sock.family == socket.AF_UNIX}
        links: dict[Wire, Link] = _transport("sharing").share(near, dialled, self.deadline)
        if self.transport == "shm" and (without := sorted({peer for peer, _ in near.keys() - links.keys()})):
            raise RendezvousError(f"rank {self.rank} can't share memory with {names(without)}; use transport='auto' or 'unix'", without[0])
        return links


def _beside(port: int) -> str:
    """The name of the UNIX socket beside a TCP listener; one that nobody can guess when the port is 0."""
    return f"@hostring-{port or os.urandom(8).hex()}"


def _transport(name: str) -> Any:
    return importlib.import_module(f"hostring.transports.{name}")
