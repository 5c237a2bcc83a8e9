"""Ring: every rank has a link to its left and its right neighbour only."""

from __future__ import annotations

from hostring.topologies.routes import Builder, Place
from hostring.topologies.schedule import DATA, Range, Schedule, segments


def neighbours(rank: int, world_size: int) -> set[int]:
    return {(rank - 1) % world_size, (rank + 1) % world_size} - {rank}


def next_hop(at: int, dst: int, world_size: int) -> int:
    """The shorter way round; to the right when both are equal."""
    right = (dst - at) % world_size
    return (at + 1) % world_size if right <= world_size - right else (at - 1) % world_size


def chain(place: Place, n_elements: int, order: str, segment: int) -> Schedule:
    """The sum grows from rank 0 to rank N-1, then the result travels round the ring. At most 2·S bytes sent per rank.

    Cost: 2(N-1) rounds before the first segment is everywhere, then one segment per round.
    """
    build = Builder()
    rank, last = place.rank, place.world_size - 1
    right, left = (rank + 1) % place.world_size, (rank - 1) % place.world_size
    for s, (a, b) in enumerate(segments(0, n_elements, segment)):
        mine = Range(DATA, a, b)
        if rank > 0:
            partial = build.recv(rank - 1 + s, left, Range("partial", 0, b - a), raw=rank == 1)
            build.fold(rank - 1 + s, mine, (partial, mine))
        if rank < last:
            build.send(rank + s, right, mine, raw=rank == 0)
            build.recv(last + rank + s, left, mine)
        if rank != last - 1:
            build.send(last + (rank + 1 if rank < last else 0) + s, right, mine)
    return build.schedule(n_elements)


def rotate(place: Place, n_elements: int, order: str, segment: int) -> Schedule:
    """The classical ring: N-1 rounds of reduce-scatter, then N-1 of all-gather. 2(N-1)/N·S bytes sent per rank.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69(2), 2009.
    """
    build = Builder()
    rank, n = place.rank, place.world_size
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = place.chunks(n_elements)
    pieces = max(1, -(-(chunks[0][1] - chunks[0][0]) // segment))
    for k in range(2 * (n - 1)):
        reducing = k < n - 1
        outgoing = (rank - 1 - k) % n if reducing else (rank - (k - (n - 1))) % n
        incoming = (outgoing - 1) % n
        for s in range(pieces):
            build.send(k * pieces + s, right, _piece(chunks[outgoing], s, segment), raw=k == 0)
            into = _piece(chunks[incoming], s, segment)
            if reducing:
                partial = build.recv(k * pieces + s, left, Range("partial", 0, len(into)), raw=k == 0)
                build.fold(k * pieces + s, into, (partial, into))
            else:
                build.recv(k * pieces + s, left, into)
    return build.schedule(n_elements)


def _piece(chunk: tuple[int, int], s: int, segment: int) -> Range:
    start, stop = chunk
    return Range(DATA, min(start + s * segment, stop), min(start + (s + 1) * segment, stop))
