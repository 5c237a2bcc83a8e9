"""torch collectives that move data: gather, scatter, all-to-all, objects."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_contributions import FLOATS, INTS, contribution  # noqa: E402
from torch_ranks import pool  # noqa: E402

from hostring.integrations.torch_backend import Options  # noqa: E402


def _movements(group):
    rank, n = group.rank, group.world_size
    for dtype in (torch.bool, *INTS, *FLOATS, torch.complex64, torch.float8_e4m3fn):
        rows = [contribution(r, 6, dtype=torch.float32).to(dtype) for r in range(n)]
        bits = [r.view(torch.uint8) if dtype == torch.float8_e4m3fn else r for r in rows]

        def same(a, b, dtype=dtype):
            return (
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                if dtype == torch.float8_e4m3fn
                else torch.equal(a, b)
            )

        x = rows[rank].clone()
        dist.broadcast(x, n - 1)
        assert same(x, rows[n - 1]), dtype
        outs = [torch.zeros(6, dtype=torch.float32).to(dtype) for _ in range(n)]
        dist.all_gather(outs, rows[rank].clone())
        assert all(same(a, b) for a, b in zip(outs, rows, strict=True)), dtype
        whole = torch.zeros(6 * n, dtype=torch.float32).to(dtype)
        dist.all_gather_into_tensor(whole, rows[rank].clone())
        assert same(whole, torch.cat(bits).view(dtype) if dtype == torch.float8_e4m3fn else torch.cat(rows)), dtype
        gathered = [torch.zeros(6, dtype=torch.float32).to(dtype) for _ in range(n)] if rank == 1 else None
        dist.gather(rows[rank].clone(), gathered, dst=1)
        assert rank != 1 or all(same(a, b) for a, b in zip(gathered, rows, strict=True)), dtype
        part = torch.zeros(6, dtype=torch.float32).to(dtype)
        dist.scatter(part, rows if rank == 0 else None, src=0)
        assert same(part, rows[rank]), dtype
    return True


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_movement_of_every_dtype(world_size):
    assert all(pool.run(world_size, _movements))


def _all_to_alls(group):
    rank, n = group.rank, group.world_size
    sent = [
        [contribution(10 * src + dst, src + 2 * dst + 1) for dst in range(n)] for src in range(n)
    ]  # uneven both ways
    outs = [torch.zeros_like(sent[src][rank]) for src in range(n)]
    dist.all_to_all(outs, [t.clone() for t in sent[rank]])
    assert all(torch.equal(a, sent[src][rank]) for src, a in enumerate(outs))
    whole = torch.zeros(sum(t.numel() for t in outs))
    dist.all_to_all_single(whole, torch.cat(sent[rank]), [t.numel() for t in outs], [t.numel() for t in sent[rank]])
    assert torch.equal(whole, torch.cat([sent[src][rank] for src in range(n)]))
    matrix = torch.arange(n * n * 3.0).view(n, n, 3)
    even = torch.zeros(n, 3)
    dist.all_to_all_single(even, matrix[rank].clone())
    assert torch.equal(even, matrix[:, rank])
    return True


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("topology", ["mesh", "ring"])
def test_all_to_all_even_uneven_and_listed(world_size, topology):
    assert all(pool.run(world_size, _all_to_alls, pg_options=Options(topology=topology)))


def _uneven_gathers(group):
    n = group.world_size
    rows = [contribution(r, r + 1) for r in range(n)]
    outs = [torch.zeros(r + 1) for r in range(n)]
    dist.all_gather(outs, rows[group.rank].clone())
    assert all(torch.equal(a, b) for a, b in zip(outs, rows, strict=True))
    return True


def test_all_gather_takes_parts_of_different_sizes():
    assert all(pool.run(3, _uneven_gathers))


def _objects(group):
    rank, n = group.rank, group.world_size
    everyone = [None] * n
    dist.all_gather_object(everyone, {"rank": rank, "text": "é" * rank})
    assert everyone == [{"rank": r, "text": "é" * r} for r in range(n)]
    shared = [("from", 1), [1, 2]] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [("from", 1), [1, 2]]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(n)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    gathered = [None] * n if rank == 0 else None
    dist.gather_object(rank * 11, gathered, dst=0)
    assert gathered == ([11 * r for r in range(n)] if rank == 0 else None)
    if rank == 0:
        dist.send_object_list(["a", 2], dst=1)
    elif rank == 1:
        got = [None, None]
        dist.recv_object_list(got, src=0)
        assert got == ["a", 2]
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_objects(world_size):
    assert all(pool.run(world_size, _objects))
