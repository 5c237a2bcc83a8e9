"""All-reduce schedules on symbols: the fold order of every element, the bytes, the rounds, and that a broken schedule is caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from oracle import COMBINATIONS, HELD

from hostring.arrays.fold import expression
from hostring.engine.frames import Call, decode
from hostring.topologies import TOPOLOGIES, check_order
from hostring.topologies.proof import NotCertified, certify_all_reduce, combinations, contribution, declared, simulate
from hostring.topologies.schedule import DATA, Fold, Range, Recv, Round, Schedule, Send

SEGMENT = 4
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 33)  # nothing, fewer than ranks, odd, and around the borders of segments


def schedules(
    topology: str, variant: str, order: str, world_size: int, n_elements: int, segment: int = SEGMENT
) -> list[Schedule]:
    t = TOPOLOGIES[topology]
    return [
        t.variants[variant].build(t.place(rank, world_size), n_elements, order, segment) for rank in range(world_size)
    ]


def test_the_combinations_are_those_that_the_design_promises():
    assert set(combinations()) == set(COMBINATIONS)


@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize(("topology", "variant", "order"), COMBINATIONS)
def test_every_element_is_folded_in_the_declared_order(topology, variant, order, world_size):
    for n_elements in SIZES:
        certificate = certify_all_reduce(topology, variant, order, world_size, n_elements, SEGMENT)
        assert certificate.rounds >= 1, "an empty all-reduce takes its place among the calls, too"


def test_the_declared_orders_are_written_as_the_contract_says():
    assert expression("rank", "abcde") == (((("a", "b"), "c"), "d"), "e")
    assert expression("ring", "abcde", 3) == (((("d", "e"), "a"), "b"), "c")
    assert expression("tree", "abcde") == ((("a", "b"), ("c", "d")), "e")
    assert expression("tree", "abcdefg") == ((("a", "b"), ("c", "d")), (("e", "f"), "g"))
    x = contribution
    assert declared("ring", 2, 3) == [(x(1, 0), x(0, 0)), (x(1, 1), x(0, 1)), (x(0, 2), x(1, 2))]


def sent(topology: str, variant: str, world_size: int, n_elements: int, order: str | None = None) -> list[int]:
    order = order or HELD[topology, variant][0]
    return [s.sent_elements() for s in schedules(topology, variant, order, world_size, n_elements)]


@pytest.mark.parametrize("world_size", range(2, 9))
class TestElementsSent:
    """The cost formulas, exact for every rank."""

    def test_one_shot_sends_all_to_all(self, world_size):
        assert sent("mesh", "one_shot", world_size, 33) == [(world_size - 1) * 33] * world_size

    @pytest.mark.parametrize("order", ["rank", "ring", "tree"])
    def test_two_shot_sends_two_parts_in_n_of_the_buffer_per_other_rank(self, world_size, order):
        n_elements = 12 * world_size
        assert (
            sent("mesh", "two_shot", world_size, n_elements, order)
            == [2 * (world_size - 1) * n_elements // world_size] * world_size
        )

    def test_two_shot_with_uneven_chunks(self, world_size):
        n_elements = 12 * world_size + 1
        base = 12
        for rank, elements in enumerate(sent("mesh", "two_shot", world_size, n_elements)):
            chunk = base + (rank == 0)
            assert elements == n_elements - chunk + chunk * (world_size - 1)

    def test_relay_sends_as_much_as_one_shot(self, world_size):
        assert sent("ring", "relay", world_size, 33) == [(world_size - 1) * 33] * world_size

    def test_chain_sends_at_most_the_buffer_twice(self, world_size):
        twice = [2 * 33] * (world_size - 2)
        assert sent("ring", "chain", world_size, 33) == [*twice, 33, 33]

    def test_rotate_sends_as_much_as_two_shot(self, world_size):
        n_elements = 12 * world_size
        assert (
            sent("ring", "rotate", world_size, n_elements)
            == [2 * (world_size - 1) * n_elements // world_size] * world_size
        )

    def test_a_leaf_of_the_star_sends_the_buffer_once(self, world_size):
        assert sent("star", "stream", world_size, 33) == [(world_size - 1) * 33, *[33] * (world_size - 1)]

    def test_a_rank_of_the_tree_sends_once_up_and_once_to_each_child(self, world_size):
        elements = sent("tree", "reduce_broadcast", world_size, 33)
        assert sum(elements) == 2 * 33 * (world_size - 1)
        assert elements[-1] == 33

    @pytest.mark.parametrize(
        ("topology", "variant", "rounds"),
        [
            ("mesh", "one_shot", lambda n: 1),
            ("mesh", "two_shot", lambda n: 2),
            ("ring", "relay", lambda n: n // 2),
            ("ring", "chain", lambda n: 2 * (n - 1)),
            ("ring", "rotate", lambda n: 2 * (n - 1)),
            ("star", "stream", lambda n: 2),
            ("tree", "reduce_broadcast", lambda n: 2 * (n - 1).bit_length()),
        ],
    )
    def test_rounds_of_one_segment(self, world_size, topology, variant, rounds):
        certificate = certify_all_reduce(topology, variant, HELD[topology, variant][0], world_size, world_size, 1 << 20)
        assert certificate.rounds == rounds(world_size)


def test_raw_contributions_travel_marked_and_sums_do_not():
    for schedule in schedules("mesh", "one_shot", "rank", 5, 33):
        assert schedule.sent_elements(raw=False) == 0
    for rank, schedule in enumerate(schedules("ring", "chain", "rank", 5, 33)):
        assert schedule.sent_elements(raw=True) == (33 if rank == 0 else 0)


def test_messages_of_a_star_pipeline_so_that_the_hub_sends_while_it_receives():
    hub = schedules("star", "stream", "rank", 4, 10 * SEGMENT)[0]
    both = [k for k, r in enumerate(hub.rounds) if r.sends and r.recvs]
    assert len(both) == 9


@pytest.mark.parametrize(("topology", "order"), [("tree", "rank"), ("tree", "ring")])
def test_a_pair_that_can_not_hold_is_refused_with_what_can(topology, order):
    with pytest.raises(ValueError, match="order='tree', or topology mesh, ring, star"):
        check_order(topology, order)


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


@pytest.mark.parametrize(
    "breakage",
    [
        wrong_fold, swapped_operands, missing_fold, lost_message, unread_message, wrong_peer, shifted, wrong_mark, late_message,
        overwritten_scratch, received_over_what_is_sent, folded_before_it_is_whole, used_after_it_was_consumed,
    ],
)  # fmt: skip
def test_a_broken_schedule_is_not_certified(breakage: Breakage, monkeypatch):
    n_elements, world_size = 3, 3
    broken = schedules("mesh", "one_shot", "rank", world_size, n_elements)
    breakage(broken)

    def build(place, n_elements, order, segment):
        return broken[place.rank]

    variant = dataclasses.replace(TOPOLOGIES["mesh"].variants["one_shot"], build=build)
    monkeypatch.setitem(TOPOLOGIES["mesh"].variants, "one_shot", variant)
    with pytest.raises(NotCertified):
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


def test_positions_beyond_32_bits():
    """Buffers of more than 2 GiB: the arithmetic of schedules and headers is that of whole numbers."""
    n_elements, world_size = 5 * (1 << 30) + 3, 3
    for rank, schedule in enumerate(schedules("mesh", "two_shot", "rank", world_size, n_elements, 1 << 28)):
        chunk = n_elements // 3 + (rank < n_elements % 3)
        assert schedule.sent_elements() == n_elements - chunk + 2 * chunk
        assert max(s.what.stop for r in schedule.rounds for s in r.sends) == n_elements
    header = decode(Call("all_reduce", "sum", 12, "rank", n_elements).header(7, 3, 12, 8 * n_elements))
    assert header is not None
    assert (header.n_elements, header.payload_nbytes, header.round, header.part) == (n_elements, 8 * n_elements, 7, 3)
    assert f"all_reduce #0 of {n_elements} elements, float64, op sum" in header.describe()
