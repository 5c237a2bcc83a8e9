"""Groups of many ranks: they start, and every collective gives what the declared fold says."""

from __future__ import annotations

import time

import numpy as np
import pytest
from oracle import bits, fold_in_order, rank_distinct

from hostring.commands.plan import price_point
from hostring.cost.network import ethernet


def collectives(comm, sizes=(1, 100, 5000)):
    """All collectives on rank-distinct rows. Returns what is wrong."""
    n, rank = comm.world_size, comm.rank
    wrong = []
    for n_elements in sizes:
        rows = rank_distinct(n, n_elements)
        total = fold_in_order("rank", rows)
        results = {
            "all_reduce": (comm.all_reduce(rows[rank].copy()), total),
            "reduce": (comm.reduce(rows[rank].copy(), n - 1), total if rank == n - 1 else rows[rank]),
            "broadcast": (comm.broadcast(rows[rank].copy(), 1), rows[1]),
            "all_gather": (comm.all_gather(rows[rank]), np.stack(rows)),
        }
        wrong += [f"{name} of {n_elements}" for name, (got, want) in results.items() if bits(got) != bits(want)]
    rows = rank_distinct(n, 3 * n)
    part = slice(3 * rank, 3 * rank + 3)
    if bits(comm.reduce_scatter(rows[rank])) != bits(fold_in_order("rank", rows)[part]):
        wrong.append("reduce_scatter")
    if bits(comm.all_to_all(rows[rank])) != bits(np.concatenate([row[part] for row in rows])):
        wrong.append("all_to_all")
    stacked = np.stack(rows).reshape(n, -1)
    if bits(comm.scatter(stacked if rank == 0 else None, 0, out=np.empty(3 * n, np.float32))) != bits(rows[rank]):
        wrong.append("scatter")
    gathered = comm.gather(rows[rank], 0)
    if rank == 0 and bits(gathered) != bits(stacked):
        wrong.append("gather")
    if comm.decide(np.array([rank]), lambda all_of_them: all_of_them.sum(0)).tolist() != [n * (n - 1) // 2]:
        wrong.append("decide")
    comm.barrier()
    return wrong


def timed(comm):
    """Wrong results, when this rank had its group, and when it was through, on the clock that all processes share."""
    started = time.monotonic()
    return collectives(comm, (1, 100)), started, time.monotonic()


def test_twenty_ranks_in_one_process(run_ranks):
    assert run_ranks(20, collectives) == [[]] * 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_four_ranks_in_one_process(run_ranks):
    began, worked = time.monotonic(), time.process_time()
    results = run_ranks(64, timed, deadline=300.0, timeout=120.0)
    assert [wrong for wrong, *_ in results] == [[]] * 64
    print(_figures("64 threads", began, results), f"{time.process_time() - worked:.1f} s of processor time")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixteen_processes(run_processes):
    began = time.monotonic()
    outcome = run_processes(16, timed, deadline=300.0, timeout=120.0)
    assert [kind for kind, _ in outcome] == ["ok"] * 16
    assert [value[0] for _, value in outcome] == [[]] * 16
    print(_figures("16 processes", began, [value for _, value in outcome]))


def _figures(what, began, results):
    """For people, with `pytest -s`: no test judges a time."""
    started = max(start for _, start, _ in results) - began
    return f"\n{what}: all have their group {started:.1f} s after the first was started, and are through after " + (
        f"{max(end for *_, end in results) - began:.1f} s"
    )


@pytest.mark.parametrize("nbytes", [4096, 1 << 20, 1 << 26])
def test_four_thousand_ranks_are_priced(nbytes):
    """Bounds that hold for any schedule: every rank hears of all others, and receives the result at least once."""
    network = ethernet(4096)
    point = price_point(network, nbytes, "any")
    assert {"mesh", "ring", "star", "tree", "dissemination"} <= set(point.offers)
    for offer in point.offers.values():
        assert offer.seconds > 12 * network.line.latency if offer.topology in ("tree", "dissemination") else True
        assert offer.seconds > network.line.latency + nbytes / network.line.rate
    assert point.best.seconds == min(offer.seconds for offer in point.offers.values())
