"""What a rank knows of the others before it has links with them: from a store, or from a static ring's file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hostring.errors import RendezvousError
from hostring.group.handshake import KINDS
from hostring.group.listeners import open_listeners
from hostring.group.peer_info import Entry, PeerInfo
from hostring.group.rendezvous import exchange, linger
from hostring.group.roster import Roster
from hostring.group.start import Start
from hostring.group.store_host import open_store
from hostring.store.client import TcpStore
from hostring.store.stores import Store, TorchStore
from hostring.transports.addresses import Address, any_host, beside, hosts_to_bind, is_here, is_loopback, resolve
from hostring.transports.link import LinkKey

if TYPE_CHECKING:
    from hostring.group.ring_file import Ring

Neighbours = Callable[[int, int], set[int]]
"""(rank, world_size) -> the ranks that `rank` needs data links with."""

Exchange = Callable[[bytes], list[bytes]]
"""Publishes this rank's bytes and returns those of all ranks, by rank."""


@dataclass
class Peers:
    """The other ranks, and who makes the links with them.

    Attributes:
        infos: by rank; None for a rank that this one knows nothing of (yet).
        hosts: addresses of this host at which the others can reach it, best first.
        dials, accepts: links that this rank makes, and those that their other ends make.
        addresses: of each peer that it dials, best first.
        store: what this was read from, if that was a store.
    """

    roster: Roster
    infos: list[PeerInfo | None]
    hosts: list[str]
    dials: list[LinkKey]
    accepts: list[LinkKey]
    addresses: dict[int, list[Address]]
    store: Store | None = None


def from_store(start: Start, neighbours: Neighbours, given: Exchange | None, hosts: Sequence[str] | None) -> Peers:
    """All ranks learn the addresses of all; the higher rank of each pair dials. `given` replaces the store."""
    store = _open_store(start) if given is None else None
    hosts = list(hosts or _hosts(start, store))
    trouble: Exception | None = None
    addresses: list[Address] = []
    try:
        addresses = open_listeners(start, hosts)
    except RendezvousError as exc:  # the others must hear of it: they are about to gather
        trouble = exc
    mine = _entry(start, addresses, str(trouble or ""))
    entries = _publish(start, mine, store, given)
    if trouble is not None:
        raise trouble
    roster = Roster(start.config.name, start.config.secret, mine, entries)
    roster.check()
    start.waiting.next_phase()
    if isinstance(store, TcpStore):
        store.deadline = 0.0
    keys = _link_keys(start.rank, start.world_size, neighbours)
    dials, accepts = [key for key in keys if key[0] < start.rank], [key for key in keys if key[0] > start.rank]
    ways = {peer: _usable(start, roster.addresses_of(peer)) for peer in range(start.rank)}
    return Peers(roster, [entry.info for entry in entries], hosts, dials, accepts, ways, store)


def _open_store(start: Start) -> Store:
    """The store that the configuration names. Rank 0 keeps its own up for a moment if the start fails."""
    config = start.config
    store, close = open_store(config, start.deadline, start.waiting)
    start.leave.callback(close)
    if config.rank == 0 and config.hosts_store and config.store is None:  # as `lingers` in `_publish`
        start.undo.callback(linger, store, _prefix(start), config.world_size)
    return store


def _prefix(start: Start) -> str:
    return f"{start.config.name}/{start.config.restarts}"


def _publish(start: Start, mine: Entry, store: Store | None, given: Exchange | None) -> list[Entry]:
    """Returns the entries of all ranks."""
    if store is None:
        assert given is not None
        return [Entry.from_bytes(rank, payload, mine) for rank, payload in enumerate(given(mine.to_bytes()))]

    def read(rank: int, payload: bytes) -> Entry:
        entry = Entry.from_bytes(rank, payload, mine)
        if rank < start.rank and entry.info.host_id == mine.info.host_id:
            start.waiting.speaks = False  # one line per host is enough
        return entry

    payload, place = mine.to_bytes(), (start.rank, start.world_size)
    lingers = start.config.store is None and start.config.hosts_store
    return exchange(store, _prefix(start), *place, payload, start.deadline, start.waiting, read, lingers=lingers)


def _hosts(start: Start, store: Store | None) -> list[str]:
    """Where to listen: on loopback, or on what leads to the store as well."""
    if start.row.reach != "network":
        return ["127.0.0.1"]
    local = store.local_host if isinstance(store, TcpStore | TorchStore) else None
    target = start.config.store_host
    loopback = (local is None or is_loopback(local)) and (target is None or is_loopback(target))
    return hosts_to_bind(loopback=loopback, spec=start.config.interface, first=[local] if local else [])


def _entry(start: Start, addresses: list[Address], trouble: str = "") -> Entry:
    info = replace(start.me, addresses=addresses)
    return Entry(start.rank, start.world_size, os.urandom(16), start.row.ranks_have, start.contract, info, trouble)


def _link_keys(rank: int, world_size: int, neighbours: Neighbours) -> list[LinkKey]:
    others, mine = [r for r in range(world_size) if r != rank], neighbours(rank, world_size)
    near = {r for r in others if r in mine or rank in neighbours(r, world_size)}
    return [(peer, kind) for peer in others for kind in ("control", "data", "p2p") if kind != "data" or peer in near]


def _usable(start: Start, addresses: Sequence[Address]) -> list[Address]:
    """Those that this rank's transport can dial, the ones it prefers first."""
    order = {address: start.transport.usable(address) for address in addresses}
    return sorted((a for a in addresses if order[a] is not None), key=lambda a: order[a] or 0)


def from_ring(start: Start, ring: Ring) -> Peers:
    """Each rank waits for its left neighbour and dials its right one. The hello tells them who the other is."""
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
    mine = _entry(start, [(host, ring.port) for host in hosts])
    infos = [mine.info if r == rank else None for r in range(n)]
    dials, accepts = [(right, kind) for kind in KINDS], [(left, kind) for kind in KINDS]
    if n == 2:  # both could dial; one direction is enough, and there must not be two links of a kind
        dials, accepts = (dials, []) if rank == 1 else ([], accepts)
    roster = Roster(start.config.name, start.config.secret, mine, [])
    return Peers(roster, infos, hosts, dials, accepts, {right: _usable(start, addresses)})
