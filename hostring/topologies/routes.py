"""Moving ranges between ranks along the links that a topology has, store and forward, pipelined by segments.

Every collective is described once, as transfers (who owns what, who needs it where). A topology only says which link
leads towards a rank; a rank in between forwards. On a mesh every path is one link, so nothing is forwarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from hostring.arrays.fold import expression
from hostring.topologies.schedule import DATA, Builder, Range, segments, split_evenly

NextHop: TypeAlias = Callable[[int, int, int], int]  # (at, dst, world_size) -> the neighbour of `at` towards `dst`


@dataclass(frozen=True)
class Place:
    """One rank's view of the group: who it is and how its messages travel.

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
        result = transfer.result and max(depth.values()) == 1  # what is passed on may be for ranks of several dtypes
        pieces = segments(0, len(transfer.what), segment)
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
    """A part of every rank's `DATA` that is folded at `owners`, each into its own `into[owner]`.

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
            _Piece(build, share, ways, number, s, a, b).add(order)
        longest = max(longest, ways.longest)
    return longest


class _Ways:
    """How the contributions to one share travel past this rank: the same for all of its segments.

    Attributes:
        longest: hops of the longest way to an owner, at least 1.
        here: by source, of those whose contribution comes past: (hops from it, parent here or None at the source, children here).
    """

    def __init__(self, place: Place, share: Share) -> None:
        self.rank, self.world_size = place.rank, place.world_size
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


class _Piece:
    """One segment of one share: its contributions on their way, and its fold."""

    def __init__(self, build: Builder, share: Share, ways: _Ways, number: int, s: int, a: int, b: int) -> None:
        self.build, self.share, self.ways = build, share, ways
        self.name, self.s, self.a, self.b = f"in.{number}", s, a, b

    def add(self, order: str) -> None:
        share, ways = self.share, self.ways
        held = {src: self._carry(src, *way) for src, way in ways.here.items()}
        if ways.rank in share.into:
            into = _cut(share.into[ways.rank], self.a - share.start, self.b - share.start)
            terms = [held[src] for src in range(ways.world_size)]
            self.build.fold(self.s + ways.longest - 1, into, expression(order, terms, share.ring_start))

    def _own(self) -> Range:
        return Range(DATA, self.a, self.b)

    def _carry(self, src: int, hops: int, parent: int | None, children: Sequence[int]) -> Range:
        if parent is None:
            held = self._own()
        else:
            # A slot is free again once its segment was folded, and was forwarded one round after it came.
            slots = max(self.ways.longest - hops, 1 if children else 0) + 1
            held = Range(f"{self.name}.{src}.{self.s % slots}", 0, self.b - self.a)
            self.build.recv(self.s + hops - 1, parent, held, raw=True)
        for child in children:
            self.build.send(self.s + hops, child, held, raw=True)
        return held


def shares_of(
    place: Place, n_elements: int, order: str, into: Callable[[int, int], Mapping[int, Range]]
) -> list[Share]:
    """The whole buffer as one share or, for the "ring" order, as one share per chunk, since each starts elsewhere."""
    if order != "ring":
        return [Share(0, n_elements, into(0, n_elements))]
    return [Share(a, b, into(a, b), c + 1) for c, (a, b) in enumerate(place.chunks(n_elements))]
