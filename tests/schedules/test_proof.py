"""A broken schedule is not certified, and each breakage is reported as what it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from built import SEGMENT, schedules

from hostring.topologies import TOPOLOGIES
from hostring.topologies.proof import NotCertified, certify_all_reduce, simulate
from hostring.topologies.schedule import DATA, Fold, Range, Recv, Round, Schedule, Send

Breakage = Callable[[list[Schedule]], None]


def _swap(schedules: list[Schedule], rank: int, k: int, **changes: object) -> None:
    rounds = list(schedules[rank].rounds)
    rounds[k] = dataclasses.replace(rounds[k], **changes)
    schedules[rank] = dataclasses.replace(schedules[rank], rounds=tuple(rounds))


def wrong_fold(s: list[Schedule]) -> None:
    fold = s[1].rounds[0].folds[0]
    (a, b), c = fold.sources
    _swap(s, 1, 0, folds=(Fold(fold.into, (a, (b, c))),))


def swapped_operands(s: list[Schedule]) -> None:
    fold = s[1].rounds[0].folds[0]
    (a, b), c = fold.sources
    _swap(s, 1, 0, folds=(Fold(fold.into, ((b, a), c)),))


def missing_fold(s: list[Schedule]) -> None:
    _swap(s, 2, 0, folds=())


def lost_message(s: list[Schedule]) -> None:
    _swap(s, 0, 0, sends=s[0].rounds[0].sends[1:])


def unread_message(s: list[Schedule]) -> None:
    _swap(s, 0, 0, recvs=s[0].rounds[0].recvs[1:])


def wrong_peer(s: list[Schedule]) -> None:
    sends = s[0].rounds[0].sends
    _swap(s, 0, 0, sends=(dataclasses.replace(sends[0], peer=2), *sends[1:]))


def shifted(s: list[Schedule]) -> None:
    sends = s[0].rounds[0].sends
    what = Range(DATA, sends[0].what.start + 1, sends[0].what.stop)
    _swap(s, 0, 0, sends=(Send(sends[0].peer, what, True), *sends[1:]))


def wrong_mark(s: list[Schedule]) -> None:
    sends = s[0].rounds[0].sends
    _swap(s, 0, 0, sends=(dataclasses.replace(sends[0], raw=False), *sends[1:]))


def late_message(s: list[Schedule]) -> None:
    s[0] = dataclasses.replace(s[0], rounds=(Round(), *s[0].rounds))


def overwritten_scratch(s: list[Schedule]) -> None:
    first, second = s[1].rounds[0].recvs
    _swap(s, 1, 0, recvs=(first, dataclasses.replace(second, into=first.into)))


def received_over_what_is_sent(s: list[Schedule]) -> None:
    first, second = s[1].rounds[0].recvs
    _swap(s, 1, 0, recvs=(Recv(first.peer, Range(DATA, 0, len(first.into)), True), second))


def folded_before_it_is_whole(s: list[Schedule]) -> None:
    fold = s[1].rounds[0].folds[0]

    def element(i: int) -> Fold:
        a, b, c = (Range(r.buffer, i, i + 1) for r in (*fold.sources[0], fold.sources[1]))
        return Fold(Range(DATA, i, i + 1), ((a, b), c))

    _swap(s, 1, 0, folds=[element(i) for i in range(len(fold.into))])


def used_after_it_was_consumed(s: list[Schedule]) -> None:
    fold = s[1].rounds[0].folds[0]
    _swap(s, 1, 0, folds=(fold, fold))


def nobody_receives(s: list[Schedule]) -> None:
    """A message too many, of which nothing depends."""
    _swap(s, 0, 0, sends=(*s[0].rounds[0].sends, s[0].rounds[0].sends[0]))


def wrong_result_mark(s: list[Schedule]) -> None:
    sends = s[0].rounds[0].sends
    _swap(s, 0, 0, sends=(dataclasses.replace(sends[0], result=True), *sends[1:]))


def sent_from_outside(s: list[Schedule]) -> None:
    sends = s[0].rounds[0].sends
    _swap(s, 0, 0, sends=(dataclasses.replace(sends[0], what=Range(DATA, 1, 4)), *sends[1:]))


def received_outside(s: list[Schedule]) -> None:
    first, second = s[1].rounds[0].recvs
    length = len(first.into)
    _swap(s, 1, 0, recvs=(dataclasses.replace(first, into=Range(first.into.buffer, length, 2 * length)), second))


def folded_to_outside(s: list[Schedule]) -> None:
    fold = s[1].rounds[0].folds[0]
    _swap(s, 1, 0, folds=(Fold(Range(DATA, 1, 4), fold.sources),))


def uneven_fold(s: list[Schedule]) -> None:
    fold = s[1].rounds[0].folds[0]
    _swap(s, 1, 0, folds=(Fold(Range(DATA, 0, 2), fold.sources),))


def folded_over_what_comes_in(s: list[Schedule]) -> None:
    fold = s[1].rounds[0].folds[0]
    _swap(s, 1, 0, folds=(fold, Fold(s[1].rounds[0].recvs[0].into, Range(DATA, 0, 3))))


def left_in_scratch(s: list[Schedule]) -> None:
    """The last round of rank 0 folds what it never received."""
    fold = s[0].rounds[0].folds[0]
    ghost = Range("ghost", 0, 3)
    s[0] = dataclasses.replace(s[0], scratch={**s[0].scratch, "ghost": 3})
    _swap(s, 0, 0, folds=(fold, Fold(Range(DATA, 0, 3), ghost)))


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (wrong_fold, r"element 0 on rank 1 is folded \('x0\[0\]', \('x1\[0\]', 'x2\[0\]'\)\), declared is"),
        (swapped_operands, r"element 0 on rank 1 is folded \(\('x1\[0\]', 'x0\[0\]'\), 'x2\[0\]'\), declared is"),
        (missing_fold, r"element 0 on rank 2 is folded x2\[0\], declared is"),
        (lost_message, "round 0, rank 1: waits for rank 0, which sends nothing"),
        (unread_message, r"round 0, rank 0: .* is read before it is written"),
        (nobody_receives, r"round 0: messages that nobody receives, by \(sender, receiver\): \{\(0, 1\): 1\}"),
        (wrong_peer, "round 0, rank 1: waits for rank 0, which sends nothing"),
        (shifted, "rank 1: rank 0 sends 2 elements, expected are 3"),
        (wrong_mark, "rank 0 marks its message raw=False, result=False, expected is raw=True, result=False"),
        (wrong_result_mark, "rank 0 marks its message raw=True, result=True, expected is raw=True, result=False"),
        (late_message, "round 0, rank 1: waits for rank 0, which sends nothing"),
        (sent_from_outside, r"rank 0 sends: .* ends outside its buffer of 3"),
        (received_outside, r"rank 1: receives into .*, which ends outside its buffer of 3"),
        (folded_to_outside, r"rank 1: folds into .*, which ends outside its buffer"),
        (uneven_fold, r"rank 1: folds \[3, 3, 3\] elements into"),
        (overwritten_scratch, r"rank 1: receives into .* and .* at once"),
        (received_over_what_is_sent, r"rank 1 receives into .*, which it is sending"),
        (folded_before_it_is_whole, r"rank 1: folds .*stop=1\), which is a part of .*stop=3\), while that comes in"),
        (folded_over_what_comes_in, r"rank 1: overwrites .* by a fold while it comes in"),
        (used_after_it_was_consumed, r"rank 1: .* or after a fold has consumed it"),
        (left_in_scratch, r"rank 0: .*'ghost'.* is read before it is written"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_broken_schedule_is_not_certified(breakage: Breakage, words: str, monkeypatch):
    n_elements, world_size = 3, 3
    broken = schedules("mesh", "one_shot", "rank", world_size, n_elements)
    breakage(broken)

    def build(place, n_elements, order, segment):
        return broken[place.rank]

    variant = dataclasses.replace(TOPOLOGIES["mesh"].variants["one_shot"], build=build)
    monkeypatch.setitem(TOPOLOGIES["mesh"].variants, "one_shot", variant)
    with pytest.raises(NotCertified, match=words):
        certify_all_reduce("mesh", "one_shot", "rank", world_size, n_elements, SEGMENT)


def test_a_message_over_a_link_that_is_not_there_is_not_certified(monkeypatch):
    monkeypatch.setitem(TOPOLOGIES["ring"].variants, "chain", TOPOLOGIES["mesh"].variants["two_shot"])
    place = TOPOLOGIES["ring"].place
    mesh = TOPOLOGIES["mesh"].place
    monkeypatch.setattr(
        type(TOPOLOGIES["ring"]), "place", lambda self, *at: mesh(*at) if self.name == "ring" else place(*at)
    )
    with pytest.raises(NotCertified, match="no link"):
        certify_all_reduce("ring", "chain", "rank", 5, 10, SEGMENT)


def test_a_send_of_something_undefined_is_not_certified():
    ghost = Range("ghost", 0, 1)
    rounds = (Round(sends=(Send(1, ghost),)),)
    pair = [Schedule(rounds, 1, scratch={"ghost": 1}), Schedule((Round(recvs=(Recv(0, Range(DATA, 0, 1)),)),), 1)]
    with pytest.raises(NotCertified, match="before it is written"):
        simulate(pair, [{DATA: ["a"]}, {DATA: ["b"]}])
