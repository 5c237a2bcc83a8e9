"""The collectives as schedules, for any topology: who owns what, and who needs it where.

How it travels is in `routes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from hostring.topologies.routes import Builder, Place, Share, Transfer, contribute, contributed, move, moved
from hostring.topologies.schedule import DATA, OUT, Range, Schedule, offsets

WHOLE: Final = 1 << 62  # a segment length that never splits: on a direct link, data that only moves needs no pipelining
FOLDING: Final = ("reduce", "reduce_scatter")  # besides all_reduce


def one_shot(place: Place, n_elements: int, order: str, segment: int) -> Schedule:
    """All-reduce for small messages: everybody's contribution goes to everybody, and each rank folds for itself.

    Cost: (N-1)·S bytes sent per rank. On a mesh 1 round, one network latency. On a ring, where it is called "relay" and
    the contributions travel both ways round, about N/2 rounds.
    """
    return _to_all_of(place, n_elements, order, segment, range(place.world_size))


def _to_all_of(place: Place, n_elements: int, order: str, segment: int, owners: Iterable[int]) -> Schedule:
    """Each of `owners` folds the whole of everybody's `DATA` into its own."""
    # The "ring" order starts elsewhere in each chunk.
    parts = [(0, n_elements)] if order != "ring" else place.chunks(n_elements)
    shares = [Share(a, b, {r: Range(DATA, a, b) for r in owners}, c + 1) for c, (a, b) in enumerate(parts)]
    return contributed(place, shares, order, segment, n_elements)


def owned(place: Place, n_elements: int, order: str, segment: int, owners: Sequence[tuple[int, int, int]]) -> Schedule:
    """All-reduce: each of `owners` (rank, start, stop) folds its part and hands the result to all, segment by segment.

    Cost on a mesh where each rank owns one chunk ("two-shot"): 2 rounds per segment, 2(N-1)/N·S bytes sent per rank.
    With one owner on a star ("stream"): the leaves send S, the hub (N-1)·S.
    Source: the direct algorithm of Chan et al., "Collective communication", CCPE 19(13), 2007.
    """
    build = Builder()
    n = place.world_size
    shares: list[Share] = []
    for owner, start, stop in owners:
        if order == "ring":  # a part may lie across the chunks that decide where the order starts
            for c, (a, b) in enumerate(place.chunks(n_elements)):
                if max(a, start) < min(b, stop) or (start == stop and c == 0):
                    a, b = max(a, start), max(min(b, stop), max(a, start))
                    shares.append(Share(a, b, {owner: Range(DATA, a, b)}, c + 1))
        else:
            shares.append(Share(start, stop, {owner: Range(DATA, start, stop)}))
    folded_after = contribute(place, build, shares, order, segment)
    results = []
    for share in shares:
        (owner, part), *_ = share.into.items()
        results.append(Transfer(owner, part, {r: part for r in range(n) if r != owner}, result=True))
    move(place, build, results, segment, first_round=folded_after)
    return build.schedule(n_elements)


def reduce(place: Place, n_elements: int, order: str, segment: int, root: int) -> Schedule:
    """Everybody's contribution goes to `root`, which folds. `DATA` of the others is left as it is."""
    return _to_all_of(place, n_elements, order, segment, [root])


def reduce_scatter(place: Place, counts: Sequence[int], order: str, segment: int) -> Schedule:
    """Rank c folds chunk c of everybody's `DATA` into its `OUT`. Chunks have `counts` elements."""
    shares = [Share(a, b, {c: Range(OUT, 0, b - a)}, c + 1) for c, (a, b) in enumerate(offsets(counts))]
    return contributed(place, shares, order, segment, sum(counts), counts[place.rank])


def broadcast(place: Place, n_elements: int, segment: int, root: int) -> Schedule:
    """`DATA` of `root` goes to `DATA` of all."""
    whole = Range(DATA, 0, n_elements)
    transfers = [Transfer(root, whole, {r: whole for r in range(place.world_size) if r != root})]
    return moved(place, transfers, segment, n_elements)


def all_gather(place: Place, counts: Sequence[int], segment: int) -> Schedule:
    """`DATA` of rank r, `counts[r]` elements, goes to its place in `OUT` of all, in the order of ranks."""
    places = offsets(counts)
    transfers = [
        Transfer(r, Range(DATA, 0, counts[r]), {q: Range(OUT, *places[r]) for q in range(place.world_size)})
        for r in range(place.world_size)
    ]
    return moved(place, transfers, segment, counts[place.rank], sum(counts))


def gather(place: Place, counts: Sequence[int], segment: int, root: int) -> Schedule:
    """`DATA` of rank r goes to its place in `OUT` of `root`."""
    transfers = [
        Transfer(r, Range(DATA, 0, counts[r]), {root: Range(OUT, a, b)}) for r, (a, b) in enumerate(offsets(counts))
    ]
    return moved(place, transfers, segment, counts[place.rank], sum(counts) if place.rank == root else 0)


def scatter(place: Place, counts: Sequence[int], segment: int, root: int) -> Schedule:
    """Chunk r of `DATA` of `root` goes to `OUT` of rank r."""
    transfers = [
        Transfer(root, Range(DATA, a, b), {r: Range(OUT, 0, counts[r])}) for r, (a, b) in enumerate(offsets(counts))
    ]
    return moved(place, transfers, segment, sum(counts) if place.rank == root else 0, counts[place.rank])


def all_to_all(place: Place, counts: Sequence[Sequence[int]], segment: int) -> Schedule:
    """Chunk q of `DATA` of rank r, `counts[r][q]` elements, goes to chunk r of `OUT` of rank q."""
    n = place.world_size
    sent = [offsets(row) for row in counts]
    received = [offsets(counts[r][q] for r in range(n)) for q in range(n)]
    transfers = [
        Transfer(r, Range(DATA, *sent[r][q]), {q: Range(OUT, *received[q][r])}) for r in range(n) for q in range(n)
    ]
    return moved(place, transfers, segment, sum(counts[place.rank]), sum(counts[r][place.rank] for r in range(n)))


def schedule_of(collective: str, place: Place, n_elements: int, detail: Any, order: str, segment: int) -> Schedule:
    """The schedule of any collective but all_reduce, which has variants.

    Args:
        n_elements: of the buffer of reduce and broadcast; the others go by `detail` alone.
        detail: the root of reduce and broadcast; each rank's counts for reduce_scatter and all_gather; (root, counts)
            for gather and scatter; counts by source and destination for all_to_all; for a barrier, anything.
    """
    if collective == "reduce":
        return reduce(place, n_elements, order, segment, detail)
    if collective == "reduce_scatter":
        return reduce_scatter(place, detail, order, segment)
    if collective == "broadcast":
        return broadcast(place, n_elements, segment, detail)
    if collective == "all_gather":
        return all_gather(place, detail, segment)
    if collective == "barrier":
        return all_gather(place, [0] * place.world_size, segment)
    if collective == "all_to_all":
        return all_to_all(place, detail, segment)
    rooted = {"gather": gather, "scatter": scatter}
    return rooted[collective](place, detail[1], segment, detail[0])
