"""A group of ranks: how they connect, what they have then, and how groups are split off, rebuilt and rejoined."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hostring.group.config import Config
from hostring.group.heartbeat import Heartbeat, Loses
from hostring.group.linking import make_links
from hostring.group.peer_info import PeerInfo
from hostring.group.peers import Exchange, Neighbours, Peers, from_ring, from_store
from hostring.group.start import Start
from hostring.group.store_host import open_store
from hostring.group.waiting import Waiting
from hostring.store.stores import Store
from hostring.transports.link import Link

if TYPE_CHECKING:
    from hostring.group.rebuild import NewRank

MIN_LINKING_S = 2.0  # for the links of a rebuilt group, if its ranks were found at the last moment


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
    return find(config, neighbours=neighbours, contract=contract, exchange=exchange, hosts=hosts).link()


def find(
    config: Config,
    *,
    neighbours: Neighbours,
    contract: Mapping[str, Any],
    exchange: Exchange | None = None,
    hosts: Sequence[str] | None = None,
) -> Found:
    """The first half of `connect`, with its arguments and errors: the ranks learn of each other."""
    undo = contextlib.ExitStack()
    try:
        start = Start(config, contract, undo)
        if config.world_size > 1:
            ring = config.ring
            peers = from_store(start, neighbours, exchange, hosts) if ring is None else from_ring(start, ring)
            return Found(start, peers)
        if exchange is not None:
            exchange(b"")
        return Found(start, None)
    except BaseException:
        undo.close()
        raise


@dataclass
class Found:
    """Ranks that know of each other, as this one sees them. `link` must be called, on every rank.

    Attributes:
        start: with the deadline, and who is told of a wait.
        peers: None in a world of one.
    """

    start: Start
    peers: Peers | None

    def link(self) -> Group:
        """The second half of `connect`: make the links. Closes all that was opened if it fails."""
        config, start, peers = self.start.config, self.start, self.peers
        with start.undo as undo:
            if peers is None:
                return Group(0, 1, config.name, 0, os.urandom(32), peer_infos=[start.me], config=config)
            links = make_links(start, peers)
            undo.pop_all()
        group = Group(
            config.rank,
            config.world_size,
            config.name,
            peers.roster.epoch,
            peers.roster.secret,
            peer_infos=peers.infos,
            store=peers.store,
            hosts=peers.hosts,
            config=config,
            _leave=start.leave,
        )
        for (peer, kind), link in links.items():
            getattr(group, kind)[peer] = link
        return group


def rejoin(config: Config, *, neighbours: Neighbours, contract: Mapping[str, Any]) -> Group:
    """Rejoin a group whose survivors rebuild it. `config` is that of a first start; its rank is the one asked for.

    Raises:
        RendezvousError: nobody rebuilt the group within `config.timeout`.
    """
    from hostring.group.rebuild import Regrouping  # a first start doesn't need it

    deadline = time.monotonic() + config.timeout
    with contextlib.ExitStack() as undo:
        store, leave = open_store(config, deadline, Waiting(config.rank, deadline))
        undo.callback(leave)
        new = Regrouping(store, config.name, config.rank, 1, lambda: 0, deadline, config.world_size).rejoin()
        group = _reconnect(config, store, new, neighbours, contract, deadline)
        group.on_close(undo.pop_all().close)
        return group


def _reconnect(
    config: Config, store: Store, new: NewRank, neighbours: Neighbours, contract: Mapping[str, Any], deadline: float
) -> Group:
    """Connect as `new` says, by `deadline` or a moment after it: the others wait for every rank of the new group."""
    first = config.restarts.partition("+")[0]
    renewed = replace(
        config, rank=new.rank, world_size=new.world_size, store=store, restarts=f"{first}+{new.generation}"
    )
    left = max(deadline - time.monotonic(), MIN_LINKING_S)
    group = connect(replace(renewed, timeout=left), neighbours=neighbours, contract=contract)
    group.store, group.generation, group.config = store, new.generation, renewed
    return group


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
        peer_infos: by rank; None for a rank that this one knows nothing of.
        store: shared with all ranks, where there is one.
        hosts: addresses of this host at which the others can reach it, best first.
        config: how it was formed.
        generation: how often a rebuild was tried.
        heartbeat: signs of life among the ranks of this group, or of the one that it was split from, in which each rank
            here has its number of `numbers`.
    """

    rank: int
    world_size: int
    name: str
    epoch: int
    secret: bytes = field(repr=False)
    data: dict[int, Link] = field(default_factory=dict)
    control: dict[int, Link] = field(default_factory=dict)
    p2p: dict[int, Link] = field(default_factory=dict)
    peer_infos: list[PeerInfo | None] = field(default_factory=list)
    store: Store | None = None
    hosts: list[str] = field(default_factory=list)
    generation: int = 0
    config: Config = field(default_factory=Config, repr=False)
    heartbeat: Heartbeat | None = field(default=None, repr=False)
    numbers: list[int] = field(default_factory=list)
    _leave: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    _linked: bool = True

    @property
    def links(self) -> list[Link]:
        """All links of all kinds."""
        return [*self.data.values(), *self.control.values(), *self.p2p.values()]

    def watch(self, session: Loses) -> None:
        """Tell `session`, which uses these links, of ranks that give no sign of life, if the configuration says so."""
        silent_s = self.config.silence
        if self.heartbeat is None and silent_s and self.store is not None and self.world_size > 1:
            self.heartbeat = Heartbeat(self.store, f"{self.name}/{self.epoch}", self.rank, self.world_size, silent_s)
            self.on_close(self.heartbeat.stop)
        if self.heartbeat is not None:
            self.heartbeat.watch(session, self.numbers or range(self.world_size))

    def subgroup(
        self,
        name: str,
        ranks: Sequence[int],
        *,
        neighbours: Neighbours,
        contract: Mapping[str, Any],
        exchange: Exchange,
    ) -> Group:
        """Form a group of some of these ranks, with links of its own.

        Args:
            name: the same on all its ranks, and of no other subgroup.
            ranks: those of the subgroup, in its order.
            neighbours: as in `connect`, in the subgroup's numbers.
            contract: as in `connect`.
            exchange: gathers bytes from all ranks of the subgroup, over this group's links. Called exactly once.
        """
        full_name = f"{self.name}/{name}"
        place = replace(self.config, rank=ranks.index(self.rank), world_size=len(ranks), name=full_name)
        config = replace(place, secret=self.secret, store=None, ring=None)
        group = connect(config, neighbours=neighbours, contract=contract, exchange=exchange, hosts=self.hosts)
        group.heartbeat, group.numbers = self.heartbeat, [self.numbers[r] if self.numbers else r for r in ranks]
        return group

    def check_store(self) -> Store:
        """Raises: ValueError, when this group has no store and can't be rebuilt."""
        if self.store is None:
            raise ValueError(
                "this group has no store for ranks to find each other again; rebuild the group that it was split from"
            )
        return self.store

    def reform(
        self,
        survivors: Callable[[], int],
        *,
        min_ranks: int,
        timeout: float,
        neighbours: Neighbours,
        contract: Mapping[str, Any],
    ) -> Group:
        """Form the next generation of this group, of those who survived or rejoin. This one's links are closed.

        Args:
            survivors: how many other ranks of this group are known to be alive.
            min_ranks, timeout, neighbours, contract: as in `Comm.rebuild` and `connect`.
        """
        from hostring.group.rebuild import Regrouping

        store = self.check_store()
        known = survivors if self._linked else None
        deadline = time.monotonic() + timeout
        regrouping = Regrouping(store, self.name, self.rank, min_ranks, known, deadline, self.world_size)
        new = regrouping.survive(self.generation + 1)
        self.generation = new.generation  # if its links fail, the next try must not find what this one left
        for link in self.links:
            link.close()
        self._linked = False
        if self.heartbeat is not None:
            self.heartbeat.stop()
        group = _reconnect(self.config, store, new, neighbours, contract, deadline)
        group.on_close(self._leave.pop_all().close)
        return group

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when this group is closed."""
        self._leave.callback(callback)

    def abort(self) -> None:
        """End all links now. Descriptors are given up by `close`, which must still be called."""
        for link in self.links:
            link.abort()

    def close(self) -> None:
        """Close all links and give up the store. Idempotent."""
        for link in self.links:
            link.close()
        self._leave.close()
