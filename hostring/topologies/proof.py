"""Proof by execution on symbols: run all ranks' schedules together and see in which order every element was folded.

The proof holds for the data that the engine executes, not for a model of it. What is checked, on every rank: each
element of the result is folded in exactly the declared order, from elements of its own position; each message meets its
receive in the same round, with the same length and mark; scratch is written before it is read; nothing that is on its
way, or that a fold of the round uses, is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hostring.arrays.fold import ORDERS, Expression, expression
from hostring.topologies import TOPOLOGIES
from hostring.topologies.schedule import DATA, OUT, Fold, Range, Round, Schedule, split_evenly

Memory = dict[str, list[Any]]  # one rank's buffers; an element is a nested pair of `contribution`s, or None


class NotCertified(AssertionError):
    """A schedule does not do what it declares. The message names rank, element and both orders."""


def simulate(schedules: Sequence[Schedule], memories: list[Memory]) -> None:
    """Run the schedules of all ranks on symbolic memories, in place.

    Raises:
        NotCertified: messages don't meet, undefined scratch is read, or a buffer on its way is overwritten.
    """
    for memory, schedule in zip(memories, schedules, strict=True):
        memory.update({name: [None] * length for name, length in schedule.scratch.items()})
    for k in range(max((len(s.rounds) for s in schedules), default=0)):
        rounds = [s.rounds[k] if k < len(s.rounds) else Round() for s in schedules]
        post = _in_flight(rounds, memories, k)
        for rank, round_ in enumerate(rounds):
            for recv in round_.recvs:
                queue = post.get((recv.peer, rank), [])
                if not queue:
                    raise NotCertified(f"round {k}: rank {rank} waits for rank {recv.peer}, which sends nothing")
                values, marks = queue.pop(0)
                if len(values) != len(recv.into) or marks != (recv.raw, recv.result):
                    raise NotCertified(
                        f"round {k}: rank {recv.peer} sends {len(values)} elements, rank {rank} expects {len(recv.into)}"
                    )
                memories[rank][recv.into.buffer][recv.into.start : recv.into.stop] = values
            _check_landings(round_, f"round {k}, rank {rank}")
            for fold in round_.folds:
                _fold(memories[rank], fold, f"round {k}, rank {rank}")
        lost = {pair: len(queue) for pair, queue in post.items() if queue}
        if lost:
            raise NotCertified(f"round {k}: messages that nobody receives, by (sender, receiver): {lost}")


def _in_flight(
    rounds: Sequence[Round], memories: list[Memory], k: int
) -> dict[tuple[int, int], list[tuple[list[Any], tuple[bool, bool]]]]:
    post: dict[tuple[int, int], list[tuple[list[Any], tuple[bool, bool]]]] = {}
    for rank, round_ in enumerate(rounds):
        for send in round_.sends:
            values = _read(memories[rank], send.what, f"round {k}, rank {rank} sends")
            post.setdefault((rank, send.peer), []).append((values, (send.raw, send.result)))
            for recv in round_.recvs:
                if _overlap(recv.into, send.what):
                    raise NotCertified(f"round {k}: rank {rank} receives into {recv.into}, which it is sending")
    return post


def _overlap(a: Range, b: Range) -> bool:
    return a.buffer == b.buffer and max(a.start, b.start) < min(a.stop, b.stop)


def _check_landings(round_: Round, where: str) -> None:
    """What comes in a round may land at any time in it, and the engine folds a whole message as soon as it is there."""
    landings = [recv.into for recv in round_.recvs if len(recv.into)]
    for n, landing in enumerate(landings):
        for other in landings[:n]:
            if _overlap(landing, other):
                raise NotCertified(f"{where}: receives into {other} and {landing} at once")
        for fold in round_.folds:
            for touched in (fold.into, *_leaves(fold.sources)):
                if touched != landing and _overlap(touched, landing):
                    raise NotCertified(f"{where}: folds {touched} while {landing} comes in")
            if fold.into == landing and landing not in _leaves(fold.sources):
                raise NotCertified(f"{where}: folds into {landing} while it comes in")


def _leaves(node: Expression) -> list[Range]:
    return [node] if isinstance(node, Range) else [*_leaves(node[0]), *_leaves(node[1])]


def _read(memory: Memory, r: Range, where: str) -> list[Any]:
    values = memory[r.buffer][r.start : r.stop]
    if len(values) != len(r) or any(v is None for v in values):
        raise NotCertified(f"{where}: {r} is read before it is written, or ends outside the buffer")
    return values


def _fold(memory: Memory, fold: Fold, where: str) -> None:
    def value(node: Expression) -> list[Any]:
        if isinstance(node, Range):
            return _read(memory, node, where)
        return list(zip(value(node[0]), value(node[1]), strict=True))

    def consume(node: Expression) -> None:
        if not isinstance(node, Range):
            consume(node[0])
            consume(node[1])
        elif node.buffer not in (DATA, OUT):
            memory[node.buffer][node.start : node.stop] = [None] * len(node)

    result = value(fold.sources)
    if len(result) != len(fold.into):
        raise NotCertified(f"{where}: folds {len(result)} elements into {fold.into}")
    if not isinstance(fold.sources, Range):
        consume(fold.sources)
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
    """What an all-reduce was shown to do. `sent` is the largest number of elements that any rank sends, over `n_elements`."""

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
        NotCertified: an element on some rank is folded otherwise than declared, or a contribution is cut inside of a unit.
    """
    t = TOPOLOGIES[topology]
    schedules = [
        t.variants[variant].build(t.place(rank, world_size, unit), n_elements, order, segment)
        for rank in range(world_size)
    ]
    for rank, schedule in enumerate(schedules):
        cuts = {
            at
            for r in schedule.rounds
            for s in r.sends
            if s.raw and s.what.buffer == DATA
            for at in (s.what.start, s.what.stop)
        }
        if any(at % unit for at in cuts - {n_elements}):
            raise NotCertified(
                f"{topology}/{variant}: rank {rank} cuts its contribution at {sorted(cuts)}, not at multiples of {unit}"
            )
        strangers = {
            m.peer for r in schedule.rounds for messages in (r.sends, r.recvs) for m in messages
        } - t.neighbours(rank, world_size)
        if strangers:
            raise NotCertified(
                f"{topology}/{variant}: rank {rank} talks to {sorted(strangers)}, to which it has no link"
            )
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


def combinations() -> Iterator[tuple[str, str, str]]:
    """Every topology, variant and order that can hold."""
    for t in TOPOLOGIES.values():
        for name, variant in t.variants.items():
            for order in ORDERS:
                if order in variant.orders:
                    yield t.name, name, order
