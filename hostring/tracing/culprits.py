"""Who kept the others waiting. Each delay is told once, at the rank where it began.

Ranks record whom they waited for. Both sides of a delay may name the other, since a rank that was stopped inside a call
has recorded that it waited for its peers. And a rank that was held up in one call comes late to the next. On one time
line, a rank's wait in a call has three parts:

- until the last rank began the call: that rank came late. It was late by itself as long as it was in no other call;
- after all other ranks have ended the call: no rank was missing any more, so this rank itself stood still;
- the rest: a rank stood still inside the call, the one that the others name more than it names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from hostring.engine.counters import blamed
from hostring.tracing.timeline import Timeline

LATE: Final = "came late to"
STOOD: Final = "stood still in"
MIN_SHARE: Final = 0.1  # of the longest delay: shorter ones are not told


class Cause(NamedTuple):
    """A rank (an index), what it did, and the call in which it did that (an index)."""

    rank: int
    what: str
    call: int


@dataclass
class Delay:
    """One cause, and what came of it.

    Attributes:
        waits: seconds by the index of the rank that waited.
    """

    cause: Cause
    waits: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(self.waits.values())


def delays(timeline: Timeline) -> list[Delay]:
    """All delays of at least `MIN_SHARE` of the longest, that first."""
    found: dict[Cause, Delay] = {}
    behind: list[Cause | None] = [None] * len(timeline.ranks)  # what held up each rank in the call before
    for call in range(timeline.n_calls):
        missing = _missing_inside(timeline, call)
        parts = [list(_parts(timeline, call, rank, missing, behind)) for rank in range(len(timeline.ranks))]
        behind = [max(of_rank, default=(0.0, None), key=lambda part: part[0])[1] for of_rank in parts]
        for rank, of_rank in enumerate(parts):
            for seconds, cause in of_rank:
                if cause is not None and cause.rank != rank:
                    waits = found.setdefault(cause, Delay(cause)).waits
                    waits[rank] = waits.get(rank, 0.0) + seconds
    ordered = sorted(found.values(), key=lambda delay: -delay.seconds)
    return [delay for delay in ordered if delay.seconds >= MIN_SHARE * ordered[0].seconds]


def _parts(
    timeline: Timeline, call: int, rank: int, missing: int | None, behind: list[Cause | None]
) -> Iterator[tuple[float, Cause | None]]:
    """The parts of one rank's wait, in seconds, and the cause of each."""
    began, ended, waited = timeline.began[call], timeline.ended[call], float(timeline.waited[call, rank])
    last = int(np.argmax(began))
    late = float(np.clip(began[last] - began[rank], 0.0, waited))
    if late:
        free_since = timeline.ended[call - 1, last] if call else -np.inf
        own = float(np.clip(began[last] - max(free_since, began[rank]), 0.0, late))
        yield own, Cause(last, LATE, call)
        yield late - own, behind[last]
    others_ended = np.delete(ended, rank).max(initial=-np.inf)
    alone = float(np.clip(ended[rank] - max(others_ended, began.max()), 0.0, waited - late))
    if alone:
        yield alone, Cause(rank, STOOD, call)
    inside = waited - late - alone
    if inside > 0 and missing is not None and missing != rank:
        yield inside, Cause(missing, STOOD, call)


def _missing_inside(timeline: Timeline, call: int) -> int | None:
    """The rank that others waited for inside a call, after all had begun it: what two name each other cancels."""
    n = len(timeline.ranks)
    waits = np.zeros((n, n))
    after = np.maximum(timeline.waited[call] - (timeline.began[call].max() - timeline.began[call]), 0.0)
    for rank, peer in enumerate(timeline.blamed[call]):
        if peer >= 0:
            waits[rank, peer] = after[rank]
    seconds = blamed(waits)
    return int(np.argmax(seconds)) if seconds.max(initial=0.0) > 0 else None


@dataclass
class Share:
    """What one rank has of the critical path, in seconds: between calls, and inside them."""

    between: float = 0.0
    inside: float = 0.0


def critical_path(timeline: Timeline) -> dict[int, Share]:
    """Who determined how long it all took, by rank index: from the last end back to the first beginning.

    A call's end depends on the rank that began it last, or stood still in it; a rank's beginning, on its own time since
    the call before.
    """
    shares: dict[int, Share] = {}
    if not timeline.n_calls:
        return shares
    rank = int(np.argmax(timeline.ended[-1]))
    for call in reversed(range(timeline.n_calls)):
        began = timeline.began[call]
        last = int(np.argmax(began)) if timeline.waited[call, rank] > 0 else rank
        inside = float(timeline.ended[call, rank] - began[last])
        missing = _missing_inside(timeline, call)
        stood = timeline.waited[call, rank] - (began[last] - began[rank]) > inside / 2
        on = missing if stood and missing is not None else last
        shares.setdefault(on, Share()).inside += inside
        if call:
            shares.setdefault(last, Share()).between += float(began[last] - timeline.ended[call - 1, last])
        rank = last
    return shares
