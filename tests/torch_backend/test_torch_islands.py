"""Islands: one library inside, hostring between. Ranks are threads here; training over islands has its own file."""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from ranks import side_by_side, successes

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import hostring  # noqa: E402
from hostring.integrations.torch_backend import Options  # noqa: E402
from hostring.integrations.torch_pg.islands import choice, inside, layout  # noqa: E402
from hostring.integrations.torch_pg.new_group import connect  # noqa: E402

INNERS = ("gloo", "hostring")


def on_threads(n, fn, *, check=True, seconds=20.0, **options):
    """`fn(process group)` on n ranks. Returns results by rank; with `check=False`, exceptions too."""
    store = dist.HashStore()
    given = Options(transport="memory", **options)

    def rank(r):
        group = connect(store, r, n, timedelta(seconds=seconds), given, choice.read(given), range(n))
        try:
            return fn(group)
        finally:
            group.shutdown()

    results = side_by_side([functools.partial(rank, r) for r in range(n)])
    return successes(results) if check else results


def values(rank: int, n_elements: int) -> torch.Tensor:
    return torch.randn(n_elements, generator=torch.Generator().manual_seed(rank))


# ---------------------------------------------------------------------- which ranks, and which share
@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (2, 2, 1), (3, 2), (1, 4), (4, 2, 3)])
def test_lanes_cover_the_data_once_and_ranks_share_it_evenly(sizes):
    keys = [island for island, size in enumerate(sizes) for _ in range(size)]
    found = layout.divide(keys)
    assert [len(ranks) for ranks in found.islands] == list(sizes)
    assert [lane.start for lane in found.lanes] == [0, *(lane.stop for lane in found.lanes[:-1])]
    assert found.lanes[-1].stop == found.units
    for ranks in found.islands:
        for rank in ranks:
            share = sum(lane.stop - lane.start for lane in found.lanes if rank in lane.ranks)
            assert share * len(ranks) == found.units


def test_ranks_of_one_host_and_vendor_need_not_be_neighbours():
    found = layout.divide(["a", "b", "a", "b"])
    assert found.islands == ((0, 2), (1, 3))
    assert found.by_member() == [0, 1, 2, 3]


# ---------------------------------------------------------------------- results


def _collectives(group):
    rank, n = group.rank(), group.size()
    results = {}
    for n_elements in (0, 1, 7, 1000):
        x = values(rank, n_elements)
        group.allreduce([x])
        results["sum", n_elements] = x
    for name, op in (("avg", dist.ReduceOp.AVG), ("min", dist.ReduceOp.MIN), ("prod", dist.ReduceOp.PRODUCT)):
        results[name] = values(rank, 9).view(3, 3).t()  # not contiguous
        group.allreduce(results[name], op)
    results["half"] = values(rank, 33).bfloat16()
    group.allreduce([results["half"]])
    results["ints"] = torch.arange(5) * 10**rank
    group.allreduce([results["ints"]])
    results["bools"] = torch.tensor([rank == 1, False])
    group.allreduce(results["bools"], dist.ReduceOp.MAX)
    results["part"] = torch.empty(3)
    group.reduce_scatter_single(results["part"], values(rank, 3 * n))
    uneven = list(values(rank, sum(range(n))).split(list(range(n))))
    results["uneven part"] = torch.empty(rank)
    group.reduce_scatter([results["uneven part"]], [uneven])
    results["gathered"] = torch.empty(n, 2, dtype=torch.complex64)
    group.all_gather_single(results["gathered"], torch.tensor([rank + 1j, rank]))
    results["uneven gathered"] = [torch.empty(r + 1) for r in range(n)]
    group.allgather([results["uneven gathered"]], [values(rank, rank + 1)])
    results["broadcast"] = [values(rank, 7) for _ in range(n)]
    for root in range(n):
        group.broadcast(results["broadcast"][root], root)
    results["exchanged"] = torch.empty(n)
    group.all_to_all_single(results["exchanged"], torch.arange(float(n)) + 10 * rank, [], [])
    results["uneven exchanged"] = [torch.empty(rank + 1, 2) for _ in range(n)]
    group.alltoall(results["uneven exchanged"], [torch.full((q + 1, 2), 10.0 * rank + q) for q in range(n)])
    return results


def _check(results):
    n = len(results)
    close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=n * 4e-7)
    for n_elements in (0, 1, 7, 1000):
        total = sum(values(r, n_elements).double() for r in range(n)).float()
        for r in range(n):
            close(results[r]["sum", n_elements], total)
            assert torch.equal(results[r]["sum", n_elements], results[0]["sum", n_elements])  # the same bits
    square = torch.stack([values(r, 9).view(3, 3).t() for r in range(n)])
    halves = sum(values(r, 33).bfloat16().float() for r in range(n)).bfloat16()
    whole = sum(values(r, 3 * n) for r in range(n))
    parts = sum(values(r, sum(range(n))) for r in range(n)).split(list(range(n)))
    for r, result in enumerate(results):
        close(result["avg"], square.mean(0))
        assert torch.equal(result["min"], square.amin(0))
        close(result["prod"], square.prod(0))
        torch.testing.assert_close(result["half"], halves, rtol=2**-7, atol=0.01)
        assert torch.equal(result["ints"], torch.arange(5) * sum(10**q for q in range(n)))
        assert result["bools"].tolist() == [True, False]
        close(result["part"], whole[3 * r : 3 * r + 3])
        close(result["uneven part"], parts[r])
        assert result["gathered"].tolist() == [[q + 1j, q] for q in range(n)]
        assert all(torch.equal(got, values(q, q + 1)) for q, got in enumerate(result["uneven gathered"]))
        assert all(torch.equal(got, values(root, 7)) for root, got in enumerate(result["broadcast"]))
        assert result["exchanged"].tolist() == [10.0 * q + r for q in range(n)]
        assert all(
            torch.equal(got, torch.full((r + 1, 2), 10.0 * q + r)) for q, got in enumerate(result["uneven exchanged"])
        )


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(("n", "island_size"), [(4, 2), (6, 2), (6, 3), (5, 2)])
def test_every_collective(n, island_size, inner, monkeypatch):
    monkeypatch.setattr(inside, "MAX_SEGMENT_ELEMENTS", 64)  # 1000 elements go through in 16 segments
    _check(on_threads(n, _collectives, inner=inner, island_size=island_size))


def _summed(group):
    x = values(group.rank(), 1001)
    group.allreduce([x])
    return x


def test_islands_are_folded_in_the_declared_order():
    """Gloo's contributions are added in the order of ranks, too, so here the whole order is known."""
    a, b, c, d, e, f = (values(r, 1001).numpy() for r in range(6))
    expected = ((a + b) + (c + d)) + (e + f)
    for got in on_threads(6, _summed, inner="gloo", island_size=2):
        np.testing.assert_array_equal(got.numpy(), expected)


def test_in_strict_mode_hostring_folds_all_ranks():
    expected = functools.reduce(np.add, [values(r, 1001).numpy() for r in range(4)])
    for got in on_threads(4, _summed, inner="gloo", island_size=2, strict=True):
        np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(("n", "island_size"), [(4, 2), (6, 2), (6, 3)])
def test_bytes_between_islands(n, island_size, inner):
    def sent(group):
        group.allreduce([torch.ones(6000)]).wait()
        return group.islands.payload_sent

    n_islands = n // island_size
    by_rank = on_threads(n, sent, inner=inner, island_size=island_size, topology="all_reduce:mesh/two_shot")
    for island in range(n_islands):
        of_island = sum(by_rank[island * island_size : (island + 1) * island_size])
        assert of_island == 2 * (n_islands - 1) * (6000 * 4) // n_islands


# ---------------------------------------------------------------------- one island, islands of one rank, and refusals


def test_one_island_is_the_library_itself():
    def kind(group):
        x = torch.ones(2)
        group.allreduce([x]).wait()
        return type(group), group._get_backend(torch.device("cpu")).name(), x.tolist()

    assert on_threads(2, kind, inner="gloo", island_size=2) == [(dist.ProcessGroup, "gloo", [2.0, 2.0])] * 2


def test_islands_of_one_rank_are_plain_hostring():
    assert on_threads(3, lambda group: group.islands, inner="gloo", island_size=1) == [None] * 3


def test_without_a_size_the_ranks_of_this_host_are_one_island():
    found = on_threads(2, lambda group: type(group), inner="auto")
    assert found == [dist.ProcessGroup] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inner": "ncl"}, "'ncl' is no"),
        ({"inner": "gloo", "island_size": -1}, "-1"),
        ({"inner": "xccl"}, "without it"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        choice.read(Options(**options))


def test_ranks_of_one_island_must_have_one_library():
    store = dist.HashStore()

    def rank(r):
        given = Options(transport="memory", inner=INNERS[r % 2], island_size=2)
        connect(store, r, 4, timedelta(seconds=20), given, choice.read(given), range(4))

    found = side_by_side([functools.partial(rank, r) for r in range(4)])
    assert any(isinstance(exc, ValueError) for exc in found)  # the first to see it; it ends the group on the others
    assert all("ranks 0 and 1 are in one island" in str(exc) for exc in found), found


def test_the_environment_chooses_too(monkeypatch):
    monkeypatch.setenv("HOSTRING_INNER", "gloo")
    monkeypatch.setenv("HOSTRING_ISLAND_SIZE", "3")
    assert choice.read(None) == choice.Choice("gloo", 3)
    assert choice.read(Options(inner="hostring", island_size=2, strict=True)) == choice.Choice("hostring", 2, True)
    assert choice.read(Options(inner="off")) is None


# ---------------------------------------------------------------------- failures


def _cut_off(group):
    """End all links of this rank, as its death does, but leave gloo's: no other rank hears from it any more."""
    for comm in (group.comm, *group.islands.lanes.comms):
        for link in comm.session.group.links:
            link.abort()


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("victim", [1, 2])
def test_a_lost_rank_is_named_by_all(victim, inner):
    def step(group):
        group.allreduce([torch.ones(100)]).wait()
        if group.rank() == victim:
            _cut_off(group)
            return None
        with pytest.raises(hostring.HostringError) as first:
            group.allreduce([torch.ones(100)]).wait()
        with pytest.raises(hostring.HostringError) as again:
            group.barrier().wait()
        return first.value.rank, again.value.rank

    results = on_threads(4, step, inner=inner, island_size=2)
    assert [blamed for r, blamed in enumerate(results) if r != victim] == [(victim, victim)] * 3


@pytest.mark.parametrize("inner", INNERS)
def test_an_aborted_group_ends_the_call_of_all(inner):
    """Rank 3 is in a call that rank 0 never makes, on another thread."""

    def step(group):
        group.allreduce([torch.ones(100)]).wait()
        if group.rank() == 0:
            threading.Timer(0.3, group.abort).start()
            time.sleep(1.0)
            return True
        with pytest.raises(hostring.HostringError, match="aborted"):
            group.allreduce([torch.ones(100)]).wait()
        return True

    assert on_threads(4, step, inner=inner, island_size=2) == [True] * 4


def test_calls_that_were_queued_are_done_before_the_group_ends():
    def queue(group):
        xs = [torch.full((50,), float(group.rank())) for _ in range(20)]
        for x in xs:
            group.allreduce([x])
        group.shutdown()
        return {float(v) for x in xs for v in x}

    assert on_threads(4, queue, inner="gloo", island_size=2) == [{6.0}] * 4


@pytest.mark.parametrize("inner", INNERS)
def test_a_rank_that_does_not_come_is_named_by_all(inner):
    """Ranks of other islands miss its neighbour first, which waits for it inside."""

    def step(group):
        group.allreduce([torch.ones(100)]).wait()
        if group.rank() == 3:
            time.sleep(2.5)
            return None
        with pytest.raises(hostring.OperationTimeout) as late:
            group.allreduce([torch.ones(100)]).wait()
        return late.value.rank

    results = on_threads(4, step, inner=inner, island_size=2, seconds=1.0)
    assert results == [3, 3, 3, None]
