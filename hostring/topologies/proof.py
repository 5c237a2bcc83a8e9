"""Proof by execution on symbols: run all ranks' schedules together and see in which order every element was folded.

The proof is about the schedules that the engine executes, not about a model of them. Checked on every rank: each
element of the result is folded in exactly the declared order, from elements of its own position; each message meets its
receive in the same round, with the same length and marks; scratch is written before it is read; nothing is overwritten
while it is being sent or folded. Each check raises `NotCertified` in words of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hostring.arrays.fold import ORDERS, Expression, expression
from hostring.topologies import TOPOLOGIES
from hostring.topologies.schedule import DATA, OUT, Fold, Range, Recv, Round, Schedule, split_evenly

Memory = dict[str, list[Any]]  # one rank's buffers; an element is a nested pair of `contribution`s, or None
_Mail = tuple[list[Any], tuple[bool, bool]]  # the elements of a message, and its marks (raw, result)


class NotCertified(AssertionError):
    """A schedule does not do what it declares. The message names rank, round or element, and what is wrong."""


def simulate(schedules: Sequence[Schedule], memories: list[Memory]) -> None:
    """Run the schedules of all ranks on symbolic memories, in place.

    Raises:
        NotCertified: a message doesn't fit its receive, undefined scratch is read, or a buffer in use is overwritten.
    """
    for memory, schedule in zip(memories, schedules, strict=True):
        memory.update({name: [None] * length for name, length in schedule.scratch.items()})
    for k in range(max((len(s.rounds) for s in schedules), default=0)):
        rounds = [s.rounds[k] if k < len(s.rounds) else Round() for s in schedules]
        mail = _send(rounds, memories, k)
        for rank, round_ in enumerate(rounds):
            where = f"round {k}, rank {rank}"
            for recv in round_.recvs:
                _deliver(mail.get((recv.peer, rank), []), recv, memories[rank], where)
            _check_landings(round_, where)
            for fold in round_.folds:
                _fold(memories[rank], fold, where)
        lost = {pair: len(queue) for pair, queue in mail.items() if queue}
        if lost:
            raise NotCertified(f"round {k}: messages that nobody receives, by (sender, receiver): {lost}")


def _send(rounds: Sequence[Round], memories: list[Memory], k: int) -> dict[tuple[int, int], list[_Mail]]:
    """What is on its way in round `k`, by (sender, receiver)."""
    mail: dict[tuple[int, int], list[_Mail]] = {}
    for rank, round_ in enumerate(rounds):
        for send in round_.sends:
            values = _read(memories[rank], send.what, f"round {k}, rank {rank} sends")
            mail.setdefault((rank, send.peer), []).append((values, (send.raw, send.result)))
            for recv in round_.recvs:
                if _overlap(recv.into, send.what):
                    raise NotCertified(f"round {k}: rank {rank} receives into {recv.into}, which it is sending")
    return mail


def _deliver(queue: list[_Mail], recv: Recv, memory: Memory, where: str) -> None:
    """Give `recv` the next message of the queue from its peer."""
    if not queue:
        raise NotCertified(f"{where}: waits for rank {recv.peer}, which sends nothing")
    values, marks = queue.pop(0)
    n_elements = len(recv.into)
    if len(values) != n_elements:
        raise NotCertified(f"{where}: rank {recv.peer} sends {len(values)} elements, expected are {n_elements}")
    if marks != (recv.raw, recv.result):
        sent, expected = (f"raw={raw}, result={result}" for raw, result in (marks, (recv.raw, recv.result)))
        raise NotCertified(f"{where}: rank {recv.peer} marks its message {sent}, expected is {expected}")
    target = memory[recv.into.buffer]
    if recv.into.stop > len(target):
        raise NotCertified(f"{where}: receives into {recv.into}, which ends outside its buffer of {len(target)}")
    target[recv.into.start : recv.into.stop] = values


def _overlap(a: Range, b: Range) -> bool:
    return a.buffer == b.buffer and max(a.start, b.start) < min(a.stop, b.stop)


def _check_landings(round_: Round, where: str) -> None:
    """A message may land at any time in its round, and the engine folds a whole message as soon as it is there."""
    landings = [recv.into for recv in round_.recvs if len(recv.into)]
    for n, landing in enumerate(landings):
        for other in landings[:n]:
            if _overlap(landing, other):
                raise NotCertified(f"{where}: receives into {other} and {landing} at once")
        for fold in round_.folds:
            for touched in (fold.into, *_leaves(fold.sources)):
                if touched != landing and _overlap(touched, landing):
                    raise NotCertified(f"{where}: folds {touched}, which is a part of {landing}, while that comes in")
            if fold.into == landing and landing not in _leaves(fold.sources):
                raise NotCertified(f"{where}: overwrites {landing} by a fold while it comes in")


def _leaves(node: Expression) -> list[Range]:
    return [node] if isinstance(node, Range) else [*_leaves(node[0]), *_leaves(node[1])]


def _read(memory: Memory, r: Range, where: str) -> list[Any]:
    values = memory[r.buffer][r.start : r.stop]
    if len(values) != len(r):
        raise NotCertified(f"{where}: {r} ends outside its buffer of {len(memory[r.buffer])}")
    if any(v is None for v in values):
        raise NotCertified(f"{where}: {r} is read before it is written, or after a fold has consumed it")
    return values


def _fold(memory: Memory, fold: Fold, where: str) -> None:
    leaves = _leaves(fold.sources)
    if any(len(leaf) != len(fold.into) for leaf in leaves):
        raise NotCertified(f"{where}: folds {[len(leaf) for leaf in leaves]} elements into {fold.into}")
    if len(memory[fold.into.buffer]) < fold.into.stop:
        raise NotCertified(f"{where}: folds into {fold.into}, which ends outside its buffer")

    def value(node: Expression) -> list[Any]:
        if isinstance(node, Range):
            return _read(memory, node, where)
        return list(zip(value(node[0]), value(node[1]), strict=True))

    result = value(fold.sources)
    for leaf in leaves if len(leaves) > 1 else ():  # the engine accumulates in scratch
        if leaf.buffer not in (DATA, OUT):
            memory[leaf.buffer][leaf.start : leaf.stop] = [None] * len(leaf)
    memory[fold.into.buffer][fold.into.start : fold.into.stop] = result


def contribution(rank: int, i: int) -> str:
    """The symbol for element `i` of what `rank` brings."""
    return f"x{rank}[{i}]"


def declared(order: str, world_size: int, n_elements: int, unit: int = 1) -> list[Expression]:
    """The declared fold of every element of an all-reduce."""
    chunks = split_evenly(n_elements, world_size, unit)
    starts = [c + 1 for c, (a, b) in enumerate(chunks) for _ in range(a, b)]
    return [expression(order, [contribution(r, i) for r in range(world_size)], starts[i]) for i in range(n_elements)]


@dataclass(frozen=True)
class Certificate:
    """What an all-reduce was shown to do. `sent` is the most elements that a rank sends, divided by `n_elements`."""

    topology: str
    variant: str
    order: str
    world_size: int
    n_elements: int
    rounds: int
    sent: float


def certify_all_reduce(
    topology: str, variant: str, order: str, world_size: int, n_elements: int, segment: int, unit: int = 1
) -> Certificate:
    """Prove one all-reduce on symbols.

    Args:
        unit: elements of a contribution that must stay together; `segment` is a multiple of it.

    Raises:
        NotCertified: an element on some rank is folded in another order than declared, a contribution is cut inside a
            unit, a rank talks to one that it has no link to, or what `simulate` raises.
    """
    t = TOPOLOGIES[topology]
    build = t.variants[variant].build
    places = [t.place(rank, world_size, unit) for rank in range(world_size)]
    schedules = [build(place, n_elements, order, segment) for place in places]
    for rank, schedule in enumerate(schedules):
        _check_links(schedule, t.neighbours(rank, world_size), f"{topology}/{variant}: rank {rank}")
        _check_cuts(schedule, unit, f"{topology}/{variant}: rank {rank}")
    memories: list[Memory] = [{DATA: [contribution(rank, i) for i in range(n_elements)]} for rank in range(world_size)]
    simulate(schedules, memories)
    wanted = declared(order, world_size, n_elements, unit)
    for rank, memory in enumerate(memories):
        for i, (got, want) in enumerate(zip(memory[DATA], wanted, strict=True)):
            if got != want:
                where = f"{topology}/{variant}, order {order}, {world_size} ranks"
                raise NotCertified(f"{where}: element {i} on rank {rank} is folded {got}, declared is {want}")
    sent = max(s.sent_elements() for s in schedules) / n_elements if n_elements else 0.0
    return Certificate(topology, variant, order, world_size, n_elements, max(len(s.rounds) for s in schedules), sent)


def _check_links(schedule: Schedule, neighbours: set[int], who: str) -> None:
    strangers = {m.peer for r in schedule.rounds for messages in (r.sends, r.recvs) for m in messages} - neighbours
    if strangers:
        raise NotCertified(f"{who} talks to {sorted(strangers)}, to which it has no link")


def _check_cuts(schedule: Schedule, unit: int, who: str) -> None:
    raw = [s.what for r in schedule.rounds for s in r.sends if s.raw and s.what.buffer == DATA]
    cuts = {at for what in raw for at in (what.start, what.stop)} - {schedule.data}
    if any(at % unit for at in cuts):
        raise NotCertified(f"{who} cuts its contribution at {sorted(cuts)}, not at multiples of {unit}")


def combinations() -> Iterator[tuple[str, str, str]]:
    """Every topology, variant and order that can hold."""
    for t in TOPOLOGIES.values():
        for name, variant in t.variants.items():
            for order in ORDERS:
                if order in variant.orders:
                    yield t.name, name, order
