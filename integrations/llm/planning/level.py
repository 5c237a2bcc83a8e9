"""Share units out over ranks so that all are done together, as far as whole units and memory allow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hostring.integrations.llm.planning.ranks import Line

Shares = tuple[int, ...]

_HALVINGS = 60  # of the time that is searched for
_MAX_MOVES = 500  # of a border to the next one


@dataclass(frozen=True)
class Lane:
    """One rank's time.

    Attributes:
        held: seconds that it has to do already. line: of what is shared out.
        nbytes: of one unit. pool: which memory they take.
    """

    held: float
    line: Line
    nbytes: float = 0.0
    pool: str = ""

    def seconds(self, n: float) -> float:
        return self.held + self.line.seconds(n)


def level(
    borders: Sequence[int], lanes: Sequence[Lane], room: dict[str, float] | None = None, least: int = 0
) -> Shares:
    """Contiguous shares, one per rank in order, that end on `borders`.

    The longest lane is as short as it can be, then all are as even as they can be. What doesn't fit in memory still
    gets a share, one that overflows least: see `overflow`.

    Args:
        borders: where a share may end, from 0 to the total, rising.
        room: bytes that are left in each pool; pools without an entry have no limit.
        least: units that every rank must get.
    """
    room = room or {}
    ideal = _filled(borders[-1], lanes, room)
    cuts = _rounded(borders, list(accumulate(ideal))[:-1], len(lanes), least)

    def worth(cuts: Sequence[int]) -> tuple[float, ...]:
        shares = _shares(borders, cuts)
        ends = sorted((lane.seconds(n) for lane, n in zip(lanes, shares, strict=True)), reverse=True)
        return (overflow(lanes, shares, room), ends[0], sum(end * end for end in ends))

    return _shares(borders, _climbed(cuts, len(borders) - 1, least, worth))


def overflow(lanes: Sequence[Lane], shares: Shares, room: dict[str, float]) -> float:
    """Bytes by which the pools are too small for these shares."""
    taken: dict[str, float] = {}
    for lane, n in zip(lanes, shares, strict=True):
        taken[lane.pool] = taken.get(lane.pool, 0.0) + n * lane.nbytes
    return sum(max(0.0, nbytes - room[pool]) for pool, nbytes in taken.items() if pool in room)


def _filled(total: int, lanes: Sequence[Lane], room: dict[str, float]) -> list[float]:
    """Shares of any size that are all done at one time, but for those that are out of memory."""
    low, high = 0.0, max(lane.seconds(total) for lane in lanes)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(_until(middle, total, lanes, room)) < total:
            low = middle
        else:
            high = middle
    amounts = _until(high, total, lanes, room)
    if not sum(amounts):
        return [total / len(lanes)] * len(lanes)
    return [amount * total / sum(amounts) for amount in amounts]


def _until(end: float, total: int, lanes: Sequence[Lane], room: dict[str, float]) -> list[float]:
    """What each rank has done at `end`; ranks of one pool give way alike where it is too small."""
    amounts = [
        min(total, max(0.0, (end - lane.held - lane.line.fixed) / lane.line.each)) if lane.line.each > 0 else total
        for lane in lanes
    ]
    for pool, left in room.items():
        nbytes = sum(n * lane.nbytes for n, lane in zip(amounts, lanes, strict=True) if lane.pool == pool)
        if nbytes > left:
            part = max(0.0, left) / nbytes
            amounts = [n * part if lane.pool == pool else n for n, lane in zip(amounts, lanes, strict=True)]
    return amounts


def _rounded(borders: Sequence[int], stops: Sequence[float], n_ranks: int, least: int) -> list[int]:
    """The nearest border to each stop, as positions in `borders`, with at least `least` units for every rank."""
    last, cuts = len(borders) - 1, [0]
    for rank, stop in enumerate(stops, 1):
        at = bisect_left(borders, stop)
        if at > 0 and (at > last or stop - borders[at - 1] <= borders[at] - stop):
            at -= 1
        cuts.append(min(max(at, cuts[-1] + least), last - least * (n_ranks - rank)))
    return [*cuts, last]


def _climbed(
    cuts: Sequence[int], last: int, least: int, worth: Callable[[Sequence[int]], tuple[float, ...]]
) -> Sequence[int]:
    """Move one unit from a rank to another, as long as that makes `worth` less. cuts: positions of borders."""
    n = len(cuts) - 1
    best = worth(cuts)
    for _ in range(_MAX_MOVES):
        found = cuts
        for i in range(1, n):
            for j in range(i, n):
                for step in (-1, 1):
                    moved = [k + step if i <= at <= j else k for at, k in enumerate(cuts)]
                    if moved[i] - moved[i - 1] < least or moved[j + 1] - moved[j] < least:
                        continue
                    if (value := worth(moved)) < best:
                        best, found = value, moved
        if found is cuts:
            break
        cuts = found
    return cuts


def _shares(borders: Sequence[int], cuts: Sequence[int]) -> Shares:
    return tuple(borders[b] - borders[a] for a, b in pairwise(cuts))
