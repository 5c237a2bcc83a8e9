"""What a rank knows of the others before it has links with them: read from a store, or from a static ring's configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hostring.errors import RendezvousError
from hostring.group.handshake import KINDS, Wire
from hostring.group.listeners import beside, open_listeners, warn_if_open
from hostring.group.peer_info import Member, this_member
from hostring.group.rendezvous import Store, TcpStore, TorchStore, exchange, linger
from hostring.group.ring_file import Ring
from hostring.group.roster import Entry, Roster
from hostring.group.start import Start
from hostring.group.store_host import open_store
from hostring.transports.addresses import Address, any_host, hosts_to_bind, is_here, is_loopback, resolve

Neighbours = Callable[[int, int], set[int]]
"""(rank, world_size) -> the ranks that `rank` needs data links with."""

Exchange = Callable[[bytes], list[bytes]]
"""Publishes this rank's bytes and returns those of all ranks, by rank."""


@dataclass
class Peers:
    """The other ranks, and who makes the links with them.

    Attributes:
        members: by rank; None for a rank that this one knows nothing of (yet).
        hosts: addresses of this host at which the others can reach it, best first.
        dials, accepts: links that this rank makes, and those that their other ends make.
        addresses: of each peer that it dials, best first.
        store: what this was read from, where it was a store.
    """

    roster: Roster
    members: list[Member | None]
    hosts: list[str]
    dials: list[Wire]
    accepts: list[Wire]
    addresses: dict[int, list[Address]]
    store: Store | None = None


def from_store(start: Start, neighbours: Neighbours, given: Exchange | None, hosts: Sequence[str] | None) -> Peers:
    """All ranks learn the addresses of all; the higher rank of each pair dials. `given` takes the place of the store."""
    store, publish = _store(start) if given is None else (None, given)
    hosts = list(hosts or _hosts(start, store))
    trouble: Exception | None = None
    addresses: list[Address] = []
    try:
        addresses = open_listeners(start, hosts)
    except (OSError, RendezvousError) as exc:  # the others must hear of it: they are about to gather
        trouble = exc
    mine = _entry(start, addresses, str(trouble or ""))
    entries = [Entry.from_bytes(rank, payload) for rank, payload in enumerate(publish(mine.to_bytes()))]
    if trouble is not None:
        raise trouble
    roster = Roster(start.config.name, start.config.secret, mine, entries)
    roster.check()
    start.progress.next_phase()
    if isinstance(store, TcpStore):
        store.deadline = 0.0
    if start.rank == 0:
        warn_if_open(start, hosts)
    wires = _wires(start.rank, start.world_size, neighbours)
    dials, accepts = [wire for wire in wires if wire[0] < start.rank], [wire for wire in wires if wire[0] > start.rank]
    ways = {peer: _preferred(start, roster.addresses_of(peer)) for peer in range(start.rank)}
    return Peers(roster, list(roster.members), hosts, dials, accepts, ways, store)


def _store(start: Start) -> tuple[Store, Exchange]:
    """The store that the configuration names, and how it is used."""
    config = start.config
    store, close = open_store(config, start.deadline, start.progress)
    start.leave.callback(close)
    prefix = f"{config.name}/{config.restarts}"
    if config.rank == 0 and config.hosts_store and config.store is None:
        start.undo.callback(linger, store, prefix, config.world_size)
    me = this_member([])

    def inspect(rank: int, payload: bytes) -> None:
        entry = Entry.from_bytes(rank, payload)
        entry.check_place(start.rank, start.world_size)
        if rank < start.rank and entry.member.host_id == me.host_id:
            start.progress.speaks = False  # one line per host is enough

    def publish(payload: bytes) -> list[bytes]:
        return exchange(store, prefix, start.rank, start.world_size, payload, start.deadline, start.progress, inspect)

    return store, publish


def _hosts(start: Start, store: Store | None) -> list[str]:
    """Where to listen: on loopback, or on what leads to the store as well."""
    if start.transport != "tcp":
        return ["127.0.0.1"]
    local = store.local_host if isinstance(store, TcpStore | TorchStore) else None
    target = start.config.store_host
    loopback = (local is None or is_loopback(local)) and (target is None or is_loopback(target))
    return hosts_to_bind(loopback=loopback, spec=start.config.interface, first=[local] if local else [])


def _entry(start: Start, addresses: list[Address], trouble: str = "") -> Entry:
    return Entry(
        start.rank, start.world_size, os.urandom(16), start.transport, start.contract, this_member(addresses), trouble
    )


def _wires(rank: int, world_size: int, neighbours: Neighbours) -> list[Wire]:
    others, mine = [r for r in range(world_size) if r != rank], neighbours(rank, world_size)
    near = {r for r in others if r in mine or rank in neighbours(r, world_size)}
    return [(peer, kind) for peer in others for kind in ("control", "data", "p2p") if kind != "data" or peer in near]


def _preferred(start: Start, addresses: Sequence[Address]) -> list[Address]:
    """Ways to shared memory come first, unless this rank wants none."""
    near = [address for address in addresses if address[0].startswith("@")]
    return [*(near if start.shares else []), *(address for address in addresses if address not in near)]


def from_ring(start: Start, ring: Ring) -> Peers:
    """Each rank waits for its left neighbour and dials its right one; what they know of each other comes with the hello."""
    rank, n = start.rank, start.world_size
    right, left = (rank + 1) % n, (rank - 1) % n
    addresses = [(host, ring.right_port) for host in resolve(ring.right_ip)]
    if not addresses:
        raise RendezvousError(f"rank {rank}: right_ip {ring.right_ip!r} of RING_CONFIG can't be resolved")
    if is_here(ring.right_ip):
        addresses.append((beside(ring.right_port), 0))
    near = is_loopback(ring.right_ip) and (ring.master_ip is None or is_loopback(ring.master_ip))
    hosts = hosts_to_bind(loopback=near, spec=start.config.interface)
    open_listeners(start, hosts if near or start.config.interface else [any_host()], ring.port)
    warn_if_open(start, hosts)
    mine = _entry(start, [(host, ring.port) for host in hosts])
    members = [mine.member if r == rank else None for r in range(n)]
    dials, accepts = [(right, kind) for kind in KINDS], [(left, kind) for kind in KINDS]
    if n == 2:  # both could dial; one direction is enough, and there must not be two links of a kind
        dials, accepts = (dials, []) if rank == 1 else ([], accepts)
    roster = Roster(start.config.name, start.config.secret, mine, [])
    return Peers(roster, members, hosts, dials, accepts, {right: _preferred(start, addresses)})
