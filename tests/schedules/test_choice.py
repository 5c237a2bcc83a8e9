"""Which schedule a call takes, and that no choice changes a bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from oracle import bits, fold_in_order, rank_distinct

from hostring.engine.choice import WHOLE, Threshold, Tuner
from hostring.topologies import TOPOLOGIES
from hostring.topologies.rules import TUNED, read_rules
from hostring.tuning.defaults import default_table

pytestmark = pytest.mark.usefixtures("no_file_of_the_user")


@pytest.mark.parametrize("order", ["rank", "ring", "tree"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 100])
@pytest.mark.parametrize("one_host", [True, False])
def test_defaults_cover_every_size_with_what_is_allowed(order, world_size, one_host):
    for topology in ("auto", "ring", "star", *(["tree"] if order == "tree" else [])):
        rules = read_rules(topology, order)
        table = default_table(Tuner(topology, order, world_size).allowed, world_size, one_host=one_host)
        assert set(table) == set(TUNED)
        for collective, thresholds in table.items():
            ends = [t.upto for t in thresholds]
            assert ends == sorted(ends)
            assert ends[-1] == WHOLE
            assert {(t.topology, t.variant) for t in thresholds} <= set(rules.allowed(collective, order, world_size))


def by_default(world_size):
    tuner = Tuner("auto", "rank", world_size)
    tuner.adopt(default_table(tuner.allowed, world_size, one_host=True), "the defaults")
    return tuner


def test_small_messages_take_one_round_and_large_ones_few_bytes():
    for world_size, small in ((3, "mesh/one_shot"), (4, "mesh/one_shot"), (8, "dissemination/doubling")):
        tuner = by_default(world_size)
        assert tuner.all_reduce(1, 4).name == small
        assert tuner.all_reduce(1 << 24, 4).name == "mesh/two_shot"
    two = by_default(2)
    assert {two.all_reduce(1 << k, 4).name for k in range(26)} == {"mesh/one_shot"}, (
        "two ranks send the same bytes either way"
    )


def test_a_table_is_checked_against_the_rules():
    tuner = Tuner("ring", "rank", 4)
    with pytest.raises(ValueError, match="mesh/one_shot is not allowed"):
        tuner.adopt({"all_reduce": [Threshold(WHOLE, "mesh", "one_shot")]}, "a file")


def test_forcing_what_cant_be_says_what_can():
    with pytest.raises(ValueError, match=r"use ring/relay or ring/chain"):
        Tuner("ring", "rank", 4).force("rotate", 8)


WAYS = [("mesh", "one_shot"), ("mesh", "two_shot"), ("ring", "relay"), ("ring", "chain"), ("star", "stream")]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_group_with_all_links_runs_every_schedule_with_the_same_bits(run_ranks, world_size):
    """And its frames and counters are those of the schedule."""
    rows = rank_distinct(world_size, 10_001)
    expected = bits(fold_in_order("rank", rows))

    def body(comm):
        results = []
        for topology, variant in WAYS:
            comm.session.planner.drop()
            comm.session.tuner.adopt({"all_reduce": [Threshold(WHOLE, topology, variant, 4096)]}, "this test")
            before, due = comm.counters.payload_sent, comm.expected_payload("all_reduce", 10_001)
            results.append(bits(comm.all_reduce(rows[comm.rank].copy())))
            assert comm.counters.payload_sent - before == due
        return results

    for results in run_ranks(world_size, body):
        assert results == [expected] * len(WAYS)


@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_every_collective_runs_by_every_topology_on_a_mesh(run_ranks, topology):
    n, rows = 4, rank_distinct(4, 96)
    total = functools.reduce(np.add, rows)

    def body(comm):
        r = comm.rank
        comm.session.tuner.adopt(
            {c: [Threshold(WHOLE, topology, "", 64)] for c in TUNED if c != "all_reduce"}, "this test"
        )
        assert bits(comm.broadcast(rows[r].copy(), root=2)) == bits(rows[2])
        assert bits(comm.all_gather(rows[r])) == bits(np.stack(rows))
        assert bits(comm.reduce_scatter(rows[r].reshape(n, -1))) == bits(total.reshape(n, -1)[r])
        assert bits(comm.reduce(rows[r].copy(), root=1)) == bits(total if r == 1 else rows[r])
        assert bits(comm.all_to_all(rows[r].reshape(n, -1))) == bits(np.stack([row.reshape(n, -1)[r] for row in rows]))
        assert bits(comm.scatter(rows[3].reshape(n, -1), root=3, out=np.empty(24, np.float32))) == bits(
            rows[3].reshape(n, -1)[r]
        )
        gathered = comm.gather(rows[r], root=1)
        assert (gathered is None) == (r != 1)
        comm.barrier()
        return True

    assert run_ranks(n, body) == [True] * n


@pytest.mark.parametrize("topology", ["ring", "star"])
def test_ranks_of_unlike_float_dtypes_move_data_by_the_same_pieces(run_ranks, topology):
    """The length of a piece must not come from the width of a rank's own dtype."""
    values = np.arange(300_000, dtype=np.float32) % 256

    def body(comm):
        x = np.array(values if comm.rank == 0 else np.zeros_like(values), np.float32 if comm.rank != 2 else np.float16)
        return bits(comm.broadcast(x, root=0).astype(np.float32))

    assert run_ranks(4, body, topology=topology) == [bits(values)] * 4


def test_uneven_shares_travel_in_long_pieces(run_ranks):
    """On a ring, shares of other lengths on each rank are not forwarded element by element."""
    counts = [1000, 20, 3, 4000]
    parts = [np.full(count, r, np.float32) for r, count in enumerate(counts)]

    def body(comm):
        got = comm.all_gather(parts[comm.rank], counts=counts)
        return bits(got), sum(link.messages_sent for link in comm.counters.links.values())

    for got, messages in run_ranks(4, body, topology="ring"):
        assert got == bits(np.concatenate(parts))
        assert messages < 200


@pytest.mark.parametrize(("wire", "narrow"), [("bfloat16", 1 / 2), ("mxint8", 33 / 128), ("mxfp4", 17 / 128)])
@pytest.mark.parametrize("world_size", [3, 4, 5, 8, 9, 16])
def test_on_a_network_large_arrays_take_the_fewest_bytes_of_the_wire(wire, narrow, world_size):
    """Bytes per byte of float32, by hand. Results travel as float32 unless the wire rounds them too."""
    share = (world_size - 1) / world_size
    sent = {"one_shot": (world_size - 1) * narrow, "two_shot": share * (narrow + 1)}
    both = {"one_shot": (world_size - 1) * narrow, "two_shot": share * 2 * narrow}
    wires = {wire: sent, **({f"{wire}-both": both} if wire.startswith("mx") else {})}
    for name, by_variant in wires.items():
        tuner = Tuner("auto", "rank", world_size)
        tuner.adopt(default_table(tuner.allowed, world_size, one_host=False, wire=name), "the defaults")
        variant = tuner.all_reduce(1 << 24, 4).variant
        assert by_variant[variant] == min(by_variant.values())


def test_on_a_network_fewer_bytes_move_the_thresholds():
    def upto(wire):
        tuner = Tuner("mesh", "rank", 8)
        tuner.adopt(default_table(tuner.allowed, 8, one_host=False, wire=wire), "the defaults")
        return tuner.table["all_reduce"][0].upto

    assert upto("float32") < upto("bfloat16") < upto("mxint8") < upto("mxfp4")
    assert upto("float32") < upto("mxint8-both") < upto("mxfp4-both")


def test_a_threshold_holds_up_to_its_border_and_not_beyond():
    tuner = Tuner("auto", "rank", 3)
    usual = dict(tuner.table)
    small, large = Threshold(4096, "mesh", "one_shot"), Threshold(WHOLE, "mesh", "two_shot")
    tuner.adopt({**usual, "all_reduce": [small, large]}, "this test")
    assert [tuner.choose("all_reduce", n, 4).variant for n in (4, 4096, 4100)] == ["one_shot", "one_shot", "two_shot"]
