"""Counters are exact, to the byte, and agree with what the schedules say."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest
from oracle import as_library, force, rank_distinct

from hostring.arrays.dtypes import BY_NAME
from hostring.engine.frames import HEADER_BYTES, SEQ

TOPOLOGIES = [("mesh", "rank"), ("ring", "rank"), ("ring", "ring"), ("star", "rank"), ("tree", "tree")]
everywhere = pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
sized = pytest.mark.parametrize("world_size", [2, 3, 4, 5])


def difference(after: dict, before: dict) -> dict:
    """What one or several calls added, by peer and in all."""
    zero = dict.fromkeys(("messages_sent", "payload_sent", "messages_received", "payload_received"), 0)
    links = {p: {k: v - before["links"].get(p, zero)[k] for k, v in link.items()} for p, link in after["links"].items()}
    return {
        "calls": {
            name: n - before["calls"].get(name, 0)
            for name, n in after["calls"].items()
            if n != before["calls"].get(name, 0)
        },
        "payload_sent": after["payload_sent"] - before["payload_sent"],
        "payload_received": after["payload_received"] - before["payload_received"],
        "header_sent": after["header_sent"] - before["header_sent"],
        "links": {p: link for p, link in links.items() if any(link.values())},
    }


def counted(comm, call) -> dict:
    before = comm.counters.snapshot()
    call(comm)
    return difference(comm.counters.snapshot(), before)


@sized
@pytest.mark.parametrize("order", ["rank", "ring", "tree"])
def test_two_shot_sends_exactly_two_parts_in_n_of_the_buffer(run_ranks, world_size, order):
    n_elements = 60 * world_size

    def body(comm):
        force(comm, "two_shot", 17)
        return counted(comm, lambda c: c.all_reduce(np.ones(n_elements, np.float32)))

    for count in run_ranks(world_size, body, order=order):
        assert count["payload_sent"] == count["payload_received"] == 2 * (world_size - 1) * 4 * n_elements // world_size
        assert {link["payload_sent"] for link in count["links"].values()} == {2 * 4 * n_elements // world_size}


def test_transfer_is_measured_and_not_what_remains_of_a_call(run_ranks, monkeypatch):
    """Time that a call spends on something else, here on its headers, is not counted as transfer."""
    spent, calls = 0.05, 4

    def slowed(*args):
        time.sleep(spent)
        SEQ.pack_into(*args)

    monkeypatch.setattr("hostring.engine.engine._set_seq", slowed)

    def body(comm):
        x = np.ones(100_000, np.float32)
        comm.all_reduce(x)
        before = comm.counters.snapshot()["seconds"]["transfer"]
        for _ in range(calls):
            comm.all_reduce(x)
        return comm.counters.snapshot()["seconds"]["transfer"] - before

    for transfer in run_ranks(3, body, topology="ring", order="ring"):
        assert 0 < transfer < spent * calls


def test_large_all_reduces_on_a_mesh_send_two_parts_in_n_by_themselves(run_ranks):
    n_elements = 300_000
    for count in run_ranks(3, lambda comm: counted(comm, lambda c: c.all_reduce(np.ones(n_elements, np.float32)))):
        assert count["payload_sent"] == 2 * 2 * 4 * n_elements // 3


CALLS = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "reduce": lambda c, x: c.reduce(x, 1),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "broadcast": lambda c, x: c.broadcast(x, 1),
    "all_gather": lambda c, x: c.all_gather(x),
    "gather": lambda c, x: c.gather(x, 1),
    "all_to_all": lambda c, x: c.all_to_all(x),
    "decide": lambda c, x: c.decide(x, lambda stacked: stacked[-1], 1),
    "barrier": lambda c, x: c.barrier(),
}


@everywhere
@sized
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_what_is_expected_is_what_is_sent(run_ranks, topology, order, world_size, dtype):
    sizes = [0, world_size, 60 * world_size, 5000 * world_size]

    def body(comm):
        results = []
        for name, n in itertools.product(CALLS, sizes):
            expected = comm.expected_payload(name, 0 if name == "barrier" else n, dtype, root=1)
            x = np.ones(n, BY_NAME[dtype])
            results.append((name, expected, counted(comm, lambda c, name=name, x=x: CALLS[name](c, x))))
        return results

    results = run_ranks(world_size, body, topology=topology, order=order)
    for rank, counts in enumerate(results):
        for name, expected, count in counts:
            assert count["payload_sent"] == expected, (rank, name)
            assert count["calls"] == {name: 1}
            messages = sum(link["messages_sent"] for link in count["links"].values())
            assert count["header_sent"] == HEADER_BYTES * messages
            assert messages + sum(link["messages_received"] for link in count["links"].values()) > 0
    for k in range(len(results[0])):
        both_ends_agree([counts[k][2]["links"] for counts in results])


@everywhere
@sized
def test_a_decision_may_be_smaller_or_larger_than_what_is_brought(run_ranks, topology, order, world_size):
    def choose(stacked):
        return stacked[:, :2].ravel().repeat(300)

    def body(comm):
        chosen, n = [], 2 * world_size * 300
        expected = comm.expected_payload("decide", (70, n), "int32", root=1)
        x = np.arange(70, dtype=np.int32) + 1000 * comm.rank
        count = counted(comm, lambda c: chosen.append(c.decide(x, choose, 1, n)))
        return chosen[0].tolist(), expected, count["payload_sent"]

    wanted = np.array([[1000 * r, 1000 * r + 1] for r in range(world_size)]).ravel().repeat(300).tolist()
    for chosen, expected, sent in run_ranks(world_size, body, topology=topology, order=order):
        assert chosen == wanted
        assert sent == expected


@everywhere
def test_a_scatter_is_counted(run_ranks, topology, order):
    def body(comm):
        whole = np.ones((4, 500), np.int16) if comm.rank == 2 else None
        expected = comm.expected_payload("scatter", 500, "int16", root=2)
        return expected, counted(comm, lambda c: c.scatter(whole, 2, out=np.empty(500, np.int16)))

    results = run_ranks(4, body, topology=topology, order=order)
    assert [count["payload_sent"] for _, count in results] == [expected for expected, _ in results]
    assert sum(expected for expected, _ in results) >= 3 * 1000
    both_ends_agree([count["links"] for _, count in results])


def both_ends_agree(links: list[dict]) -> None:
    """What one end says that it sent is what the other says that it received."""
    for rank, mine in enumerate(links):
        for peer, link in mine.items():
            other = links[peer][rank]
            assert (link["messages_sent"], link["payload_sent"]) == (
                other["messages_received"],
                other["payload_received"],
            )


@everywhere
@pytest.mark.parametrize("n_elements", [100, 60_000])
def test_mixed_dtypes_are_counted_as_they_travel(run_ranks, topology, order, n_elements):
    """A 16-bit contribution travels in 16 bits, through whomever; the first call, in which ranks learn of each other,
    counts like all.
    """
    dtypes = ["float16", "float32", "bfloat16", "float32"]

    def body(comm):
        def reduce(c):
            x = as_library(rank_distinct(4, n_elements, BY_NAME[dtypes[c.rank]])[c.rank], "numpy")
            c.all_reduce(x.copy())
            c.all_gather(x)

        return [counted(comm, reduce) for _ in range(3)]

    results = run_ranks(4, body, topology=topology, order=order)
    for k in range(3):
        both_ends_agree([counts[k]["links"] for counts in results])
        assert [counts[k]["payload_sent"] for counts in results] == [counts[0]["payload_sent"] for counts in results]
    if topology == "mesh" and n_elements == 100:
        sent = [3 * n_elements * BY_NAME[d].itemsize * 2 for d in dtypes]
        assert [counts[0]["payload_sent"] for counts in results] == sent


@pytest.mark.parametrize(("world_size", "variant"), [(2, "mesh/one_shot"), (3, "mesh/two_shot")])
def test_calls_before_a_peer_changed_its_dtype_count_as_they_were(run_ranks, world_size, variant):
    def body(comm):
        force(comm, variant, 4096)
        per_call = []
        for k in range(12):
            before = comm.counters.payload_received if k in (0, 9, 10, 11) else None
            comm.all_reduce(np.ones(3000, np.float16 if k > 9 and comm.rank == 1 else np.float32))
            per_call.append(None if before is None else comm.counters.payload_received - before)
        return per_call[0], per_call[9], per_call[10], comm.counters.payload_sent, comm.counters.payload_received

    def uncounted(comm):  # nobody asks until the end
        force(comm, variant, 4096)
        for k in range(12):
            comm.all_reduce(np.ones(3000, np.float16 if k > 9 and comm.rank == 1 else np.float32))
        return comm.counters.payload_sent, comm.counters.payload_received

    asked = run_ranks(world_size, body)
    assert run_ranks(world_size, uncounted) == [counts[-2:] for counts in asked]
    for first, tenth, changed, *_ in asked[:1]:
        assert first == tenth
        assert changed < first


def test_a_group_begins_with_nothing(run_ranks):
    """Whatever start-up exchanged is not the user's."""

    def body(comm):
        return comm.counters.snapshot()

    for topology, order in TOPOLOGIES:
        for snapshot in run_ranks(3, body, topology=topology, order=order):
            assert snapshot["calls"] == {}
            assert snapshot["payload_sent"] == snapshot["payload_received"] == snapshot["header_sent"] == 0


def test_a_snapshot_is_plain_and_independent(run_ranks):
    def body(comm):
        comm.all_reduce(np.ones(10))
        first = comm.counters.snapshot()
        again = json.loads(json.dumps(first))
        comm.all_reduce(np.ones(10))
        assert json.loads(json.dumps(first)) == again
        first["calls"]["all_reduce"] = 99
        first["links"].clear()
        return comm.counters.snapshot()["calls"], len(comm.counters.links)

    assert run_ranks(3, body) == [({"all_reduce": 2}, 2)] * 3


def test_seconds_add_up_and_name_the_late_rank(run_ranks):
    late, pause = 1, 0.3

    def body(comm):
        before, started = comm.counters.snapshot(), time.perf_counter()
        if comm.rank == late:
            time.sleep(pause)
        slept = time.perf_counter() - started
        comm.all_reduce(np.ones(1000, np.float16))
        comm.all_reduce(np.ones(100_000))
        wall = time.perf_counter() - started
        after = comm.counters.snapshot()
        seconds = {k: v - before["seconds"][k] for k, v in after["seconds"].items()}
        return wall, slept, seconds, {p: s - before["waited_for"].get(p, 0.0) for p, s in after["waited_for"].items()}

    for rank, (wall, slept, seconds, waited_for) in enumerate(run_ranks(3, body)):
        assert set(seconds) == {"stage", "wait", "transfer", "fold"}
        assert all(s >= 0 for s in seconds.values())
        assert sum(seconds.values()) <= wall + 1e-3
        if rank != late:
            assert seconds["wait"] >= pause / 2
            assert waited_for[late] >= pause / 2
            assert slept < pause / 2


def test_programs_that_are_dropped_leave_their_counts(run_ranks):
    """More shapes than are kept, each run once: nothing is lost when programs go."""
    shapes = 600

    def body(comm):
        before = comm.counters.snapshot()
        for n in range(1, shapes + 1):
            comm.all_reduce(np.ones(n, np.float32))
        count = difference(comm.counters.snapshot(), before)
        return count["payload_sent"], count["calls"], len(comm.session.planner.programs)

    for payload, calls, kept in run_ranks(2, body):
        assert payload == 4 * shapes * (shapes + 1) // 2
        assert calls == {"all_reduce": shapes}
        assert kept <= 512
