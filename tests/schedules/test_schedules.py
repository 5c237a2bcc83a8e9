"""All-reduce schedules on symbols: the fold order of every element, the bytes, the rounds."""

from __future__ import annotations

import pytest
from built import SEGMENT, schedules
from oracle import COMBINATIONS, HELD

from hostring.arrays.fold import expression
from hostring.engine.frames import Call, decode
from hostring.topologies.proof import certify_all_reduce, combinations, contribution, declared
from hostring.topologies.rules import check_order

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 33)  # nothing, fewer than ranks, odd, and around the borders of segments


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

    def test_doubling_sends_a_message_per_round_to_another_rank(self, world_size):
        for schedule in schedules("dissemination", "doubling", "rank", world_size, 3):
            messages = [send for round_ in schedule.rounds for send in round_.sends]
            assert len({send.peer for send in messages}) == len(messages) == (world_size - 1).bit_length()
            assert sum(len(send.what) for send in messages) == (world_size - 1) * 3

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
            ("dissemination", "doubling", lambda n: (n - 1).bit_length() + 1),
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
