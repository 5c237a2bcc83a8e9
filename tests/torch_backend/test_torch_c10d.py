"""Methods of torch's process group called by hand, and coalesced calls."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_ranks import pool  # noqa: E402


def _by_hand(group):
    pg, rank, n = dist.group.WORLD, group.rank, group.world_size
    x = torch.full((2,), rank + 1.0)
    pg.allreduce(x).wait()
    assert x[0] == sum(range(1, n + 1))
    pg.allreduce([x], dist.ReduceOp.MAX).wait()
    pg.allreduce(x, op=dist.ReduceOp.MIN).wait()
    b = torch.full((2,), float(rank))
    pg.broadcast(b, root=1).wait()
    pg.broadcast(b, 1).wait()
    assert b.tolist() == [1.0, 1.0]
    outs = [torch.zeros(2) for _ in range(n)]
    pg.allgather(outs, torch.full((2,), float(rank))).wait()
    assert [o[0].item() for o in outs] == list(range(n))
    part = torch.zeros(2)
    pg.scatter(part, [torch.full((2,), 5.0 + r) for r in range(n)] if rank == 0 else [], 0).wait()
    assert part.tolist() == [5.0 + rank] * 2
    pg.reduce_scatter(part, [torch.full((2,), float(r)) for r in range(n)]).wait()
    assert part.tolist() == [float(n * rank)] * 2
    pg.reduce(part, 0, dist.ReduceOp.SUM).wait()
    gathered = [torch.zeros(2) for _ in range(n)] if rank == 0 else []
    pg.gather(gathered, torch.full((2,), float(rank)), 0).wait()
    assert rank != 0 or gathered[n - 1][0] == n - 1
    whole = torch.zeros(2 * n)
    pg.gather_single(whole, torch.full((2,), rank + 1.0)).wait()
    assert rank != 0 or whole.tolist() == [r + 1.0 for r in range(n) for _ in range(2)]
    pg.barrier().wait()
    assert (pg.rank(), pg.size(), pg.name(), dist.get_backend()) == (rank, n, "hostring", "hostring")
    return True


def test_methods_of_the_group_take_both_of_their_forms():
    assert all(pool.run(2, _by_hand))


def _coalesced(group):
    rank, n = group.rank, group.world_size
    total = float(sum(range(1, n + 1)))
    xs = [torch.full((k + 1,), rank + 1.0) for k in range(4)]
    calls = dist.group.WORLD._get_backend(torch.device("cpu")).comm.counters.calls
    before = calls["all_reduce"]
    with dist.distributed_c10d._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    assert all(torch.equal(x, torch.full_like(x, total)) for x in xs)
    assert calls["all_reduce"] == before + 1
    mixed = [torch.ones(2, dtype=torch.bfloat16), torch.full((3,), rank), torch.ones(1)]
    dist.group.WORLD.allreduce(mixed).wait()
    assert [x.tolist() for x in mixed] == [[n] * 2, [sum(range(n))] * 3, [n]]
    assert calls["all_reduce"] == before + 3  # floats together, integers apart
    outs = [torch.zeros(n * 2) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for k, out in enumerate(outs):
            dist.all_gather_into_tensor(out, torch.full((2,), 10.0 * k + rank))
    manager.wait()
    assert all(out.tolist() == [10.0 * k + r for r in range(n) for _ in range(2)] for k, out in enumerate(outs))
    with dist.distributed_c10d._coalescing_manager(
        device=torch.device("cpu"), async_ops=True
    ) as manager:  # through _start_coalescing
        for x in xs:
            dist.group.WORLD.broadcast(x, 0)
        dist.group.WORLD.allreduce([xs[0]])
    manager.wait()
    assert xs[0].item() == n * total
    return True


def test_coalesced_calls():
    assert all(pool.run(2, _coalesced))
