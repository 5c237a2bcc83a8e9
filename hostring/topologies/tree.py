"""Tree: the binomial tree whose pairs are those of the "tree" order, so that partial sums may be passed up."""

from __future__ import annotations

from dataclasses import dataclass

from hostring.topologies.routes import Builder, Place
from hostring.topologies.schedule import DATA, Range, Schedule, segments


def _half(n: int) -> int:
    """How many leaves the left half of a balanced tree of `n` has: the largest power of two below `n`."""
    return 1 << ((n - 1).bit_length() - 1)


@dataclass(frozen=True)
class _Pair:
    """Rank `right` passes the sum of `leaves` ranks to rank `left`. `depth` is the height of their subtree."""

    depth: int
    left: int
    right: int
    leaves: int


def _pairs(low: int, n: int) -> list[_Pair]:
    """Every pair in the tree over ranks `low … low + n`."""
    if n <= 1:
        return []
    half = _half(n)
    return [_Pair((n - 1).bit_length(), low, low + half, n - half), *_pairs(low, half), *_pairs(low + half, n - half)]


def neighbours(rank: int, world_size: int) -> set[int]:
    return {p.right if p.left == rank else p.left for p in _pairs(0, world_size) if rank in (p.left, p.right)}


def _ancestors(rank: int, world_size: int) -> list[int]:
    """The ranks from `rank` up to the root."""
    parent = {p.right: p.left for p in _pairs(0, world_size)}
    line = [rank]
    while line[-1] in parent:
        line.append(parent[line[-1]])
    return line


def next_hop(at: int, dst: int, world_size: int) -> int:
    down = _ancestors(dst, world_size)
    return down[down.index(at) - 1] if at in down else _ancestors(at, world_size)[1]


def reduce_broadcast(place: Place, n_elements: int, order: str, segment: int) -> Schedule:
    """Sums go up the tree, the result comes down, segment by segment. At most 2·log2 N rounds before the first is done.

    Cost: every rank sends S up once and S down per child. Source: Rabenseifner, ICCS 2004 (binomial tree).
    """
    build = Builder()
    rank, n = place.rank, place.world_size
    height = (n - 1).bit_length()
    for pair in _pairs(0, n):
        if rank not in (pair.left, pair.right):
            continue
        for s, (a, b) in enumerate(segments(0, n_elements, segment)):
            mine, raw = Range(DATA, a, b), pair.leaves == 1
            up, down = pair.depth - 1 + s, 2 * height - pair.depth + s
            if rank == pair.left:
                partial = build.recv(up, pair.right, Range(f"up.{pair.depth}", 0, b - a), raw)
                build.fold(up, mine, (mine, partial))
                build.send(down, pair.right, mine)
            else:
                build.send(up, pair.left, mine, raw)
                build.recv(down, pair.left, mine)
    return build.schedule(n_elements)
