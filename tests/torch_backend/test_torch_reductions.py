"""torch's reductions: every dtype, operator and form, with the bits of Comm."""

from __future__ import annotations

import hashlib

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_contributions import FLOATS, INTS, OPS, contribution, fold  # noqa: E402
from torch_ranks import pool  # noqa: E402

from hostring.integrations.torch_backend import Options  # noqa: E402

BIT_OPS = {"band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR}


def _reductions(group):
    seen = []
    for dtypes, ops in ((FLOATS, OPS), (INTS, {k: v for k, v in {**OPS, **BIT_OPS}.items() if k != "avg"})):
        for dtype in dtypes:
            for name, op in ops.items():
                rows = [contribution(r, dtype=dtype) for r in range(group.world_size)]
                expected = fold(name, rows)
                x = rows[group.rank].clone()
                dist.all_reduce(x, op=op)
                assert torch.equal(x, expected), (dtype, name, x, expected)
                y = rows[group.rank].clone()
                dist.reduce(y, 1, op=op)
                assert torch.equal(y, expected if group.rank == 1 else rows[group.rank]), (dtype, name)
                seen.append((dtype, name))
    return len(seen)


@pytest.mark.parametrize("world_size", [2, 3])
def test_reductions_of_every_dtype_and_operator(world_size):
    assert pool.run(world_size, _reductions) == [4 * 5 + 5 * 7] * world_size


def _reduce_scatters(group):
    n = group.world_size
    rows = [contribution(r, 2 * n) for r in range(n)]
    for name, op in OPS.items():
        expected = fold(name, rows)[2 * group.rank : 2 * group.rank + 2]
        one, many = torch.zeros(2), torch.zeros(2)
        dist.reduce_scatter_tensor(one, rows[group.rank].clone(), op=op)
        dist.reduce_scatter(many, list(rows[group.rank].split(2)), op=op)
        assert torch.equal(one, expected)
        assert torch.equal(many, expected)
    uneven = [contribution(r, n * (n + 1) // 2) for r in range(n)]  # k + 1 elements for rank k
    sizes = [k + 1 for k in range(n)]
    mine = torch.zeros(group.rank + 1)
    dist.reduce_scatter(mine, list(uneven[group.rank].split(sizes)))
    assert torch.equal(mine, fold("sum", uneven).split(sizes)[group.rank])
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_scatter_even_listed_and_uneven(world_size):
    assert all(pool.run(world_size, _reduce_scatters))


def _premul(group):
    factor = torch.distributed._make_nccl_premul_sum(0.5)
    n = group.world_size
    rows = [contribution(r, 2 * n) for r in range(n)]
    expected = fold("sum", [r * 0.5 for r in rows])
    x = rows[group.rank].clone()
    dist.all_reduce(x, op=factor)
    assert torch.equal(x, expected)
    y, part = rows[group.rank].clone(), torch.zeros(2)
    dist.reduce_scatter_tensor(part, y, op=factor)
    assert torch.equal(part, expected[2 * group.rank : 2 * group.rank + 2])
    assert torch.equal(y, rows[group.rank])
    dist.reduce(y, 0, op=factor)
    assert torch.equal(y, expected if group.rank == 0 else rows[group.rank])
    by_tensor = contribution(group.rank)
    dist.all_reduce(by_tensor, op=torch.distributed._make_nccl_premul_sum(torch.tensor([2.0])))
    assert torch.equal(by_tensor, fold("sum", [2 * contribution(r) for r in range(n)]))
    return True


def test_premul_sum_scales_before_it_sums():
    assert all(pool.run(2, _premul))


def _refusals(group):
    for tensor, op in (
        (torch.ones(2), dist.ReduceOp.BAND),
        (torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG),
    ):
        with pytest.raises(TypeError, match="op="):
            dist.all_reduce(tensor, op=op)
        with pytest.raises(TypeError, match="op="):
            dist.all_reduce(tensor, op=op, async_op=True)
    with pytest.raises(ValueError, match="2 shares"):
        dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="don't divide evenly"):
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3))
    x = torch.ones(2)
    dist.all_reduce(x)  # nothing was sent: the group is as before
    return x.tolist()


def test_what_cannot_be_done_is_refused_before_anything_is_sent():
    assert pool.run(2, _refusals) == [[2.0, 2.0]] * 2


def _mixed(group):
    rank, n = group.rank, group.world_size
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    mine = dtypes[rank]
    torch.manual_seed(7)
    rows = [torch.randn(1000).to(dtypes[r]) for r in range(n)]
    reduced = rows[rank].clone()
    dist.all_reduce(reduced)
    expected = rows[0].float()
    for row in rows[1:]:
        expected = expected + row.float()
    assert torch.equal(reduced, expected.to(mine))
    received = rows[rank].clone()
    dist.broadcast(received, 0)
    assert torch.equal(received, rows[0].to(mine))
    outs = [torch.zeros(1000, dtype=mine) for _ in range(n)]
    dist.all_gather(outs, rows[rank].clone())
    assert all(torch.equal(out, row.to(mine)) for out, row in zip(outs, rows, strict=True))
    if rank == 0:
        dist.send(rows[0], 1)
    elif rank == 1:
        got = torch.zeros(1000, dtype=mine)
        dist.recv(got, 0)
        assert torch.equal(got, rows[0].to(mine))
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_different_float_dtypes_in_one_call(world_size):
    assert all(pool.run(world_size, _mixed))


def _hashes(group):
    comm = dist.group.WORLD.comm
    found = []
    for n in (1, 5, 1000, 40_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            torch.manual_seed(100 * group.rank + n)
            x = torch.randn(n).to(dtype)
            y = x.clone()
            dist.all_reduce(x)
            comm.all_reduce(y)
            found.append(tuple(hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest() for t in (x, y)))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_hash_is_that_of_comm_in_every_topology(world_size):
    seen = {}
    for topology, order in (("ring", "rank"), ("star", "rank"), ("mesh", "rank"), ("tree", "tree"), ("mesh", "tree")):
        by_rank = pool.run(world_size, _hashes, pg_options=Options(topology=topology, order=order))
        assert all(ours == comm for rank in by_rank for ours, comm in rank)
        assert all(rank == by_rank[0] for rank in by_rank)
        seen.setdefault(order, []).append(by_rank[0])
    assert all(hashes == of_order[0] for of_order in seen.values() for hashes in of_order)


def _hash_of_one(group):
    return _hashes(group)[0]


@pytest.mark.parametrize("backend", ["cpu:hostring", "cpu:hostring,cuda:hostring", "HOSTRING"])
def test_ways_to_name_the_backend(backend):
    assert len({h for rank in pool.run(2, _hash_of_one, backend=backend) for h in rank}) == 1
