"""Asynchronous calls are carried out first in, first out; calls of several threads one after the other, never mixed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from oracle import bits, fold_in_order, rank_distinct

TOPOLOGIES = [("mesh", "rank"), ("ring", "rank"), ("star", "rank"), ("tree", "tree")]


def until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def test_several_all_reduces_may_be_waited_for_in_any_order(run_ranks):
    """Each rank waits in an order of its own, on two threads; what each call gives was agreed when it was made."""
    rows = [rank_distinct(3, n, seed=n) for n in (50_000, 1, 7000, 300)]

    def body(comm):
        works = [comm.all_reduce(row[comm.rank].copy(), async_op=True) for row in rows]
        waited = list(np.random.default_rng(comm.rank).permutation(len(works)))
        with ThreadPoolExecutor(2) as pool:
            results = dict(zip(waited, pool.map(lambda k: works[k].wait(30), waited), strict=True))
        return [results[k] for k in range(len(works))]

    for results in run_ranks(3, body):
        assert [bits(x) for x in results] == [bits(fold_in_order("rank", row)) for row in rows]


@pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
def test_many_asynchronous_calls_and_blocking_ones_between(run_ranks, topology, order):
    sizes = [1, 4000, 0, 70_000, 3, 555] * 4

    def body(comm):
        ended: list[int] = []
        works = []
        for k, n in enumerate(sizes):
            x = rank_distinct(3, n, seed=k)[comm.rank]
            if k % 5 == 4:
                assert comm.all_reduce(x) is x
                assert all(w.is_completed() for w in works), "a blocking call waits its turn behind all that is queued"
                continue
            work = comm.all_gather(x, async_op=True) if k % 2 else comm.all_reduce(x, async_op=True)
            work.add_done_callback(lambda w, k=k: ended.append(k))
            works.append(work)
        results = [w.wait() for w in works]
        assert all(w.wait() is r for w, r in zip(works, results, strict=True)), "wait may be called again"
        assert until(lambda: len(ended) == len(works))
        assert ended == sorted(ended)
        return results

    for results in run_ranks(3, body, topology=topology, order=order):
        kept = [k for k in range(len(sizes)) if k % 5 != 4]
        for k, result in zip(kept, results, strict=True):
            rows = rank_distinct(3, sizes[k], seed=k)
            assert bits(result) == (b"".join(map(bits, rows)) if k % 2 else bits(fold_in_order(order, rows)))


def test_every_collective_has_an_asynchronous_form(run_ranks):
    rows = [r.reshape(3, 4) for r in rank_distinct(3, 12)]

    def body(comm):
        r = comm.rank
        works = [
            comm.all_reduce(rows[r].copy(), async_op=True),
            comm.reduce(rows[r].copy(), 1, async_op=True),
            comm.broadcast(rows[r].copy(), 2, async_op=True),
            comm.all_gather(rows[r], async_op=True),
            comm.reduce_scatter(rows[r], async_op=True),
            comm.gather(rows[r], 1, async_op=True),
            comm.scatter(rows[r] if r == 1 else None, 1, out=np.empty(4, np.float32), async_op=True),
            comm.all_to_all(rows[r], async_op=True),
            comm.barrier(async_op=True),
        ]
        assert works[-1].wait(20) is None
        assert all(w.is_completed() and w.exception() is None for w in works)
        return [w.wait() for w in works]

    total = rows[0] + rows[1] + rows[2]
    for r, results in enumerate(run_ranks(3, body)):
        expected = [
            total,
            total if r == 1 else rows[r],
            rows[2],
            np.stack(rows),
            total[r : r + 1],
            np.stack(rows),
            rows[1][r],
        ]
        expected += [np.stack([row[r] for row in rows])]
        for k, (result, want) in enumerate(zip(results, expected, strict=False)):
            if k == 5 and r != 1:
                assert result is None
            else:
                np.testing.assert_array_equal(result, want)


def test_it_ends_without_anybody_waiting(run_ranks):
    def body(comm):
        works = [comm.all_reduce(np.ones(50_000), async_op=True) for _ in range(5)]
        assert until(lambda: all(w.is_completed() for w in works))
        return [float(w.wait(0)[0]) for w in works]

    assert run_ranks(2, body) == [[2.0] * 5] * 2


def test_a_callback_may_call_the_group(run_ranks):
    def body(comm):
        seen: list[float] = []
        first = comm.all_reduce(np.ones(1), async_op=True)
        second = comm.turn(lambda: comm.all_reduce(np.full(1, 10.0)), async_op=True)
        first.wait()
        second.wait()
        third = comm.all_reduce(np.full(1, 100.0), async_op=True)
        third.add_done_callback(lambda w: seen.append(float(comm.all_reduce(np.full(1, 1000.0))[0])))
        assert until(lambda: bool(seen))
        return [float(w.wait()[0]) for w in (first, second, third)] + seen

    assert run_ranks(3, body) == [[3.0, 30.0, 300.0, 3000.0]] * 3


def test_two_threads_on_one_group_are_never_mixed(run_ranks):
    """Which two calls meet is up to the threads; that whole calls meet, and every rank gets the same, is not."""
    rounds, n_elements = 25, 3000

    def body(comm):
        results: dict[str, list[np.ndarray]] = {"a": [], "b": []}

        def loop(name: str) -> None:
            for k in range(rounds):
                value = (1.0 if name == "a" else 1000.0) * (comm.rank + 1) + k * 1e6
                results[name].append(comm.all_reduce(np.full(n_elements, value)))

        threads = [threading.Thread(target=loop, args=(name,), daemon=True) for name in results]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
            assert not t.is_alive()
        return results

    everybody = run_ranks(2, body)
    calls = [sorted(float(x[0]) for xs in results.values() for x in xs) for results in everybody]
    assert calls[0] == calls[1]
    assert len(calls[0]) == 2 * rounds
    for results in everybody:
        for x in [*results["a"], *results["b"]]:
            assert len(set(x.tolist())) == 1, "all elements of one result come from the same calls"
    assert sum(calls[0]) == sum(weight * (1 + 2) + 2 * k * 1e6 for k in range(rounds) for weight in (1.0, 1000.0))


def test_a_turn_keeps_other_threads_out(run_ranks):
    """Two threads per rank make pairs of calls of different kinds; in turns, the pairs stay whole."""

    def body(comm):
        def pair(k: int) -> tuple[float, int]:
            return float(comm.all_reduce(np.full(10, float(k)))[0]), comm.all_gather(np.arange(k + 1)).size

        works = [comm.turn(lambda k=k: pair(k), async_op=True) for k in range(4)]
        mine = comm.turn(lambda: pair(9))
        return [w.wait() for w in works], mine

    assert run_ranks(3, body) == [([(3.0 * k, 3 * (k + 1)) for k in range(4)], (27.0, 30))] * 3


def test_groups_of_one_process_do_not_disturb_each_other(run_ranks):
    """Each group has links of its own: calls of two groups may be carried out in another order on every rank."""

    def body(comm):
        groups = [comm.split(0), comm.split(0), comm.split(comm.rank % 2)]
        order = groups if comm.rank else groups[::-1]
        works = [g.all_reduce(np.full(1000, comm.rank + 1.0), async_op=True) for g in order]
        results = [float(w.wait()[0]) for w in (works if comm.rank else works[::-1])]
        for g in groups:
            g.close()
        return results

    assert run_ranks(4, body) == [[10.0, 10.0, 4.0], [10.0, 10.0, 6.0], [10.0, 10.0, 4.0], [10.0, 10.0, 6.0]]
