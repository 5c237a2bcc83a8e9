"""Dissemination: each rank has links to the ranks 1, 2, 4, 8, … places away, 2·log2 N of them at most."""

from __future__ import annotations

from hostring.arrays.fold import expression
from hostring.topologies.routes import Builder, Place
from hostring.topologies.schedule import DATA, Range, Schedule, segments


def _rounds(world_size: int) -> int:
    return (world_size - 1).bit_length()


def neighbours(rank: int, world_size: int) -> set[int]:
    steps = [1 << k for k in range(_rounds(world_size))]
    return {(rank + sign * step) % world_size for step in steps for sign in (1, -1)} - {rank}


def next_hop(at: int, dst: int, world_size: int) -> int:
    """The least power of two in the way that is left, so that ways to several ranks begin alike."""
    left = (dst - at) % world_size
    return (at + (left & -left)) % world_size


def doubling(place: Place, n_elements: int, order: str, segment: int) -> Schedule:
    """All-reduce for small messages of many ranks: every rank gets every contribution, and folds for itself.

    In round k a rank sends all contributions that it has to the rank 2^k further on, as one message. They travel in the
    dtype that is folded, since the ranks that pass them on may have others. Segments follow one after the other.

    Cost: ceil(log2 N) rounds and messages; (N-1)·S bytes sent per rank.
    Source: Bruck et al., "Efficient algorithms for all-to-all communications", IEEE TPDS 8(11), 1997 (concatenation).
    """
    build = Builder()
    rank, n, rounds = place.rank, place.world_size, _rounds(place.world_size)
    for s, (start, stop) in enumerate(segments(0, n_elements, segment)):
        length, first = stop - start, s * (rounds + 1)
        mine = Range(DATA, start, stop)
        if rounds > 1:  # what is sent later must lie beside what has come
            build.fold(first, _held(0, 1, length), mine)
        for k in range(rounds):
            step = 1 << k
            count = min(step, n - step)
            build.send(first + k, (rank + step) % n, mine if k == 0 else _held(0, count, length))
            build.recv(first + k, (rank - step) % n, _held(step, count, length))
        for chunk, (a, b) in enumerate(place.chunks(n_elements) if order == "ring" else [(start, stop)]):
            low, high = max(a, start), min(b, stop)
            if low > high or (low == high and start < stop):
                continue
            terms = [_term(rank, source, n, length, start, Range(DATA, low, high)) for source in range(n)]
            build.fold(first + rounds, Range(DATA, low, high), expression(order, terms, chunk + 1))
    return build.schedule(n_elements)


def _held(place: int, count: int, length: int) -> Range:
    """Scratch for `count` contributions, of the rank `place` places back and of those before it."""
    return Range("held", place * length, (place + count) * length)


def _term(rank: int, source: int, world_size: int, length: int, start: int, piece: Range) -> Range:
    """The elements of `piece`, a part of the segment at `start`, in the contribution of `source`."""
    if source == rank:
        return piece
    at = (rank - source) % world_size * length - start
    return Range("held", at + piece.start, at + piece.stop)
