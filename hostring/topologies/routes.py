"""How ranges travel between ranks along the links of a topology: stored and forwarded, pipelined by segments.

Every collective is described once, as transfers (who owns what, who needs it where). A topology only says which link
leads towards a rank; the ranks in between forward. On a mesh every path is one link, so nothing is forwarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from hostring.arrays.fold import Expression, expression
from hostring.topologies.schedule import DATA, OUT, Fold, Range, Recv, Round, Schedule, Send, segments, split_evenly

NextHop: TypeAlias = Callable[[int, int, int], int]  # (at, dst, world_size) -> the neighbour of `at` towards `dst`


@dataclass(frozen=True)
class Place:
    """One rank's view of the group: its rank, and how its messages travel.

    Attributes:
        unit: elements that stay together: a contribution is cut at multiples of it only.
    """

    rank: int
    world_size: int
    next_hop: NextHop
    unit: int = 1

    def chunks(self, n_elements: int) -> list[tuple[int, int]]:
        """Boundaries of each rank's chunk."""
        return split_evenly(n_elements, self.world_size, self.unit)

    def path(self, src: int, dst: int) -> list[int]:
        """The ranks from `src` to `dst`, both included."""
        path = [src]
        while path[-1] != dst:
            path.append(self.next_hop(path[-1], dst, self.world_size))
        return path


class Builder:
    """Collects the sends, receives and folds of one rank by round number, and measures the scratch that they name."""

    def __init__(self) -> None:
        self._sends: dict[int, list[Send]] = {}
        self._recvs: dict[int, list[Recv]] = {}
        self._folds: dict[int, list[Fold]] = {}
        self._scratch: dict[str, int] = {}

    def send(self, round_: int, peer: int, what: Range, raw: bool = False, result: bool = False) -> None:
        self._sends.setdefault(round_, []).append(Send(peer, what, raw, result))

    def recv(self, round_: int, peer: int, into: Range, raw: bool = False, result: bool = False) -> Range:
        """Add a receive. Returns `into`."""
        self._reserve(into)
        self._recvs.setdefault(round_, []).append(Recv(peer, into, raw, result))
        return into

    def fold(self, round_: int, into: Range, sources: Expression) -> None:
        self._reserve(into)
        self._folds.setdefault(round_, []).append(Fold(into, sources))

    def _reserve(self, r: Range) -> None:
        if r.buffer not in (DATA, OUT):
            self._scratch[r.buffer] = max(self._scratch.get(r.buffer, 0), r.stop)

    def schedule(self, data: int, out: int = 0) -> Schedule:
        """What was collected, over a `DATA` of `data` elements and an `OUT` of `out` elements."""
        last = max((*self._sends, *self._recvs, *self._folds), default=-1)
        rounds = (
            Round(self._sends.get(k, ()), self._recvs.get(k, ()), self._folds.get(k, ())) for k in range(last + 1)
        )
        return Schedule(tuple(rounds), data, out, self._scratch)


@dataclass(frozen=True)
class Transfer:
    """`what` of rank `src` goes to `into[dst]` at each `dst`. All ranges have the same length. `result`: see `Send`."""

    src: int
    what: Range
    into: Mapping[int, Range]
    result: bool = False


def move(place: Place, build: Builder, transfers: Iterable[Transfer], segment: int, first_round: int = 0) -> None:
    """Add this rank's part in `transfers`. Segment s leaves its source in round `first_round + s`."""
    for number, transfer in enumerate(transfers):
        depth, children = _spanning_tree(place, transfer)
        if place.rank not in depth:
            continue
        result = transfer.result and max(depth.values()) == 1  # a forwarded result may be for ranks of several dtypes
        pieces = segments(0, transfer.what.stop - transfer.what.start, segment)
        for s, (a, b) in enumerate(pieces):
            start = first_round + s
            here = transfer.into.get(place.rank)
            if place.rank == transfer.src:
                held = _cut(transfer.what, a, b)
                if here is not None:
                    build.fold(start, _cut(here, a, b), held)
            else:
                transit = Range(f"transit.{number}.{s % 2}", 0, b - a)
                held = transit if here is None else _cut(here, a, b)
                parent = place.path(transfer.src, place.rank)[-2]
                build.recv(start + depth[place.rank] - 1, parent, held, result=result)
            for child in children.get(place.rank, ()):
                build.send(start + depth[place.rank], child, held, result=result)


def moved(place: Place, transfers: Iterable[Transfer], segment: int, data: int, out: int = 0) -> Schedule:
    """A schedule of `transfers` alone, over a `DATA` and an `OUT` of so many elements."""
    build = Builder()
    move(place, build, transfers, segment)
    return build.schedule(data, out)


def _cut(r: Range, a: int, b: int) -> Range:
    return Range(r.buffer, r.start + a, r.start + b)


def _spanning_tree(place: Place, transfer: Transfer) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Hops from the source, and the children of each rank, over the union of the paths to all destinations."""
    depth: dict[int, int] = {transfer.src: 0}
    children: dict[int, list[int]] = {}
    for dst in transfer.into:
        path = place.path(transfer.src, dst)
        for hops, (parent, child) in enumerate(pairwise(path)):
            if child not in depth:
                depth[child] = hops + 1
                children.setdefault(parent, []).append(child)
    return depth, children


@dataclass(frozen=True)
class Share:
    """A part of every rank's `DATA` that is folded at the owners, each into its own `into[owner]`.

    `ring_start` is the rank at which the "ring" order begins for this part.
    """

    start: int
    stop: int
    into: Mapping[int, Range]
    ring_start: int = 0


def contribute(place: Place, build: Builder, shares: Sequence[Share], order: str, segment: int) -> int:
    """Send raw contributions to the owners of each share, who fold them in the declared order as they arrive.

    Returns:
        The number of rounds between the departure of a segment and its fold: the longest path, at least 1.
    """
    longest = 1
    for number, share in enumerate(shares):
        ways = _Ways(place, share)
        for s, (a, b) in enumerate(segments(share.start, share.stop, segment)):
            held = {src: _carry(build, ways, number, src, s, Range(DATA, a, b)) for src in ways.here}
            if place.rank in share.into:
                into = _cut(share.into[place.rank], a - share.start, b - share.start)
                terms = [held[src] for src in range(place.world_size)]
                build.fold(s + ways.longest - 1, into, expression(order, terms, share.ring_start))
        longest = max(longest, ways.longest)
    return longest


def contributed(place: Place, shares: Sequence[Share], order: str, segment: int, data: int, out: int = 0) -> Schedule:
    """A schedule in which `shares` are folded, and nothing else, over a `DATA` and an `OUT` of so many elements."""
    build = Builder()
    contribute(place, build, shares, order, segment)
    return build.schedule(data, out)


class _Ways:
    """How the contributions to one share travel past this rank: the same for all of its segments.

    Attributes:
        longest: hops of the longest way to an owner, at least 1.
        here: by source, for each contribution that passes this rank: (hops from the source; the neighbour that it comes
            from, None at the source itself; the neighbours that it goes on to).
    """

    def __init__(self, place: Place, share: Share) -> None:
        own = Range(DATA, share.start, share.stop)
        trees = {src: _spanning_tree(place, Transfer(src, own, share.into)) for src in range(place.world_size)}
        self.longest = max(1, *(depth[owner] for depth, _ in trees.values() for owner in share.into))
        self.here: dict[int, tuple[int, int | None, list[int]]] = {
            src: (
                depth[place.rank],
                None if src == place.rank else place.path(src, place.rank)[-2],
                children.get(place.rank, []),
            )
            for src, (depth, children) in trees.items()
            if place.rank in depth
        }


def _carry(build: Builder, ways: _Ways, number: int, src: int, s: int, own: Range) -> Range:
    """Receive segment `s` of the contribution of `src` to share `number`, and forward it. Returns where it is held."""
    hops, parent, children = ways.here[src]
    held = own
    if parent is not None:
        # A slot is free again once its segment was folded, and was forwarded one round after it came.
        slots = max(ways.longest - hops, 1 if children else 0) + 1
        held = Range(f"in.{number}.{src}.{s % slots}", 0, own.stop - own.start)
        build.recv(s + hops - 1, parent, held, raw=True)
    for child in children:
        build.send(s + hops, child, held, raw=True)
    return held
