"""Point-to-point messages:
matched by source and tag, in order, whoever sends first, and making progress by themselves.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from oracle import bits, rank_distinct

everywhere = pytest.mark.parametrize(
    ("topology", "order"), [("mesh", "rank"), ("ring", "rank"), ("star", "rank"), ("tree", "tree")]
)


def until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


@everywhere
def test_every_pair_of_ranks_whatever_the_topology(run_ranks, topology, order):
    rows = rank_distinct(4, 99)

    def body(comm):
        others = [r for r in range(4) if r != comm.rank]
        works = [comm.send(rows[comm.rank] + peer, peer, async_op=True) for peer in others]
        got = [bits(comm.recv(np.empty(99, np.float32), peer)) for peer in others]
        assert [w.wait() for w in works] == [None] * 3
        return got

    for rank, got in enumerate(run_ranks(4, body, topology=topology, order=order)):
        assert got == [bits(rows[r] + np.float32(rank)) for r in range(4) if r != rank]


def test_tags_pick_messages_out_of_order(run_ranks):
    tags = [7, 0, (1 << 64) - 1, 1 << 32, 7, 0]

    def body(comm):
        if comm.rank == 0:
            for k, tag in enumerate(tags):
                comm.send(np.array([float(k)]), 1, tag)
            return None
        order = [(1 << 32), 0, 7, (1 << 64) - 1, 0, 7]
        return [(tag, float(comm.recv(np.empty(1), 0, tag)[0])) for tag in order]

    expected = [(1 << 32, 3.0), (0, 1.0), (7, 0.0), ((1 << 64) - 1, 2.0), (0, 5.0), (7, 4.0)]
    assert run_ranks(2, body)[1] == expected


def test_messages_of_one_tag_keep_their_order_however_large(run_ranks):
    sizes = [1, 300_000, 0, 5, 70_000, 2]

    def body(comm):
        if comm.rank == 0:
            for k, n in enumerate(sizes):
                comm.send(np.full(n, float(k)), 1)
            return None
        return [set(comm.recv(np.empty(n), 0).tolist()) for n in sizes]

    assert run_ranks(2, body)[1] == [{float(k)} if n else set() for k, n in enumerate(sizes)]


def test_any_source(run_ranks):
    def body(comm):
        if comm.rank:
            comm.send(np.array([comm.rank, 0]), 0, tag=3)
            comm.send(np.array([comm.rank, 1]), 0, tag=3)
            return None
        seen = []
        for _ in range(6):
            work = comm.recv(np.empty(2, np.int64), tag=3, async_op=True)
            who, which = work.wait().tolist()
            assert work.src == who
            seen.append((who, which))
        return seen

    seen = run_ranks(4, body)[0]
    assert sorted(seen) == [(r, k) for r in (1, 2, 3) for k in (0, 1)]
    assert all(seen.index((r, 0)) < seen.index((r, 1)) for r in (1, 2, 3))


@pytest.mark.parametrize("transport", ["memory", "tcp", "unix"])
def test_both_send_first_more_than_any_buffer_holds(run_ranks, transport):
    n_elements = 1 << 23  # 64 MB

    def body(comm):
        mine = np.full(n_elements, comm.rank + 1.0)
        comm.send(mine, 1 - comm.rank)
        got = comm.recv(mine, 1 - comm.rank)
        return float(got[0]), float(got[-1]), float(got.sum())

    first, second = run_ranks(2, body, transport=transport)
    assert first == (2.0, 2.0, 2.0 * n_elements)
    assert second == (1.0, 1.0, 1.0 * n_elements)


def test_isend_before_irecv_on_one_thread(run_ranks):
    def body(comm):
        peer = 1 - comm.rank
        out = comm.send(np.full(500_000, float(comm.rank)), peer, async_op=True)
        into = comm.recv(np.empty(500_000), peer, async_op=True)
        assert set(into.wait().tolist()) == {float(peer)}
        out.wait()
        return True

    assert run_ranks(2, body) == [True, True]


def test_a_receive_that_is_only_polled_completes(run_ranks):
    def body(comm):
        if comm.rank == 0:
            time.sleep(0.05)  # so that the receive is there first
            return comm.send(np.arange(100_000.0), 1)
        work = comm.recv(np.empty(100_000), 0, async_op=True)
        assert until(work.is_completed)
        return float(work.wait(0).sum())

    assert run_ranks(2, body)[1] == float(np.arange(100_000.0).sum())


def test_a_send_that_is_only_polled_completes(run_ranks):
    def body(comm):
        if comm.rank:
            work = comm.send(np.ones(1_000_000), 0, async_op=True)
            assert until(work.is_completed)
            return None
        return float(comm.recv(np.empty(1_000_000), 1).sum())

    assert run_ranks(2, body)[0] == 1_000_000


def test_ring_of_five_with_isend_and_irecv(run_ranks):
    def body(comm):
        n, right, left = 5, (comm.rank + 1) % 5, (comm.rank - 1) % 5
        token, total = np.full(1000, float(comm.rank)), np.zeros(1000)
        for _ in range(n):
            total += token
            out = comm.send(token.copy(), right, async_op=True)
            token = comm.recv(np.empty(1000), left, async_op=True).wait()
            out.wait()
        assert set(token.tolist()) == {float(comm.rank)}
        return set(total.tolist())

    assert run_ranks(5, body) == [{10.0}] * 5


def test_many_threads_send_and_receive_at_once(run_ranks):
    n_threads, n_messages = 6, 20

    def body(comm):
        peer, failures = 1 - comm.rank, []

        def talk(tag: int) -> None:
            try:
                for k in range(n_messages):
                    size = 1 + (k * 997 + tag * 31) % 5000
                    work = comm.send(np.full(size, tag * 1000.0 + k), peer, tag, async_op=bool(k % 2))
                    got = comm.recv(np.empty(size), peer, tag)
                    assert set(got.tolist()) == {tag * 1000.0 + k}
                    if work is not None:
                        work.wait()
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=talk, args=(tag,), daemon=True) for tag in range(n_threads)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
            assert not t.is_alive()
        return failures

    assert run_ranks(2, body) == [[], []]


def test_messages_and_collectives_do_not_meet(run_ranks):
    def body(comm):
        peer = (comm.rank + 1) % 3
        waiting = comm.recv(np.empty(3), (comm.rank - 1) % 3, async_op=True)
        total = float(comm.all_reduce(np.ones(1))[0])
        comm.send(np.full(3, float(comm.rank)), peer)
        comm.barrier()
        return total, float(waiting.wait()[0])

    assert run_ranks(3, body) == [(3.0, 2.0), (3.0, 0.0), (3.0, 1.0)]


def test_messages_are_counted(run_ranks):
    def body(comm):
        peer = 1 - comm.rank
        comm.send(np.zeros(10), peer)
        comm.send(np.zeros(3, np.int16), peer, tag=5)
        comm.recv(np.zeros(3, np.int16), peer, tag=5)
        comm.recv(np.zeros(10), peer)
        link = comm.counters.links[peer]
        return link.messages_sent, link.payload_sent, link.messages_received, link.payload_received

    assert run_ranks(2, body) == [(2, 86, 2, 86)] * 2


def test_a_receive_that_waits_for_nobody_in_particular_does_not_slow_others_down(run_ranks):
    """An outstanding receive is driven in the background; a blocking exchange takes the driver's seat and gives it
    back.
    """

    def body(comm):
        late = np.zeros(3, np.float32)
        pending = comm.recv(late, src=1 - comm.rank, tag=7, async_op=True)
        time.sleep(0.02)  # the background thread drives now
        x = np.full(4, comm.rank, np.float32)
        for k in range(50):
            if comm.rank == k % 2:
                comm.send(x, 1 - comm.rank)
            else:
                comm.recv(x, 1 - comm.rank)
        comm.send(np.full(3, 10.0 + comm.rank, np.float32), 1 - comm.rank, tag=7)
        give_up = time.monotonic() + 10
        while not pending.is_completed() and time.monotonic() < give_up:
            time.sleep(0.001)
        return pending.is_completed(), late

    for rank, (done, late) in enumerate(run_ranks(2, body, transport="tcp")):
        assert done
        np.testing.assert_array_equal(late, np.full(3, 11.0 - rank, np.float32))
