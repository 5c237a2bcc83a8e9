"""Every collective of torch.distributed over hostring, against values worked out without it."""

from __future__ import annotations

import hashlib

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_ranks import pool  # noqa: E402

from hostring.integrations.torch_backend import Options  # noqa: E402

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
BIT_OPS = {"band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def contribution(rank: int, n: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, different on every rank and at every place: exact in every dtype."""
    values = torch.tensor([(3 * rank + 5 * k) % 4 + 1 for k in range(n)])
    return values.to(dtype)


def fold(op: str, rows: list[torch.Tensor]) -> torch.Tensor:
    """In rank order. Floats of 32 bits or less are folded in float32, then rounded once."""
    wide = [r.float() if r.dtype in (torch.float16, torch.bfloat16) else r for r in rows]
    steps = {
        "sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }  # fmt: skip
    total = wide[0]
    for row in wide[1:]:
        total = steps[op](total, row)
    return (total / len(rows) if op == "avg" else total).to(rows[0].dtype)


# ---------------------------------------------------------------------- reductions


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


# ---------------------------------------------------------------------- movement


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


# ---------------------------------------------------------------------- layouts


def _layouts(group):
    rank, n = group.rank, group.world_size
    total = sum(range(1, n + 1))
    transposed = torch.arange(6.0).view(2, 3).t() * (rank + 1)
    dist.all_reduce(transposed)
    assert torch.equal(transposed, torch.arange(6.0).view(2, 3).t() * total)
    strided = torch.arange(8.0) * (rank + 1)
    dist.all_reduce(strided[::2])
    assert torch.equal(
        strided, torch.arange(8.0) * torch.tensor([total, rank + 1] * 4)
    )  # its neighbours are left alone
    scalar = torch.tensor(rank + 1.0)
    dist.all_reduce(scalar)
    assert scalar.item() == total
    empty = torch.zeros(3, 0)
    dist.all_reduce(empty)
    outs = [torch.zeros(1, 0, 2) for _ in range(n)]
    dist.all_gather(outs, torch.zeros(1, 0, 2))
    parameter = torch.nn.Parameter(torch.full((2,), rank + 1.0))
    dist.all_reduce(parameter)
    assert torch.equal(parameter.data, torch.full((2,), float(total)))
    dist.broadcast(parameter, 0, async_op=True).wait()
    view = torch.zeros(2, n).t()  # outputs that are not contiguous
    dist.all_gather_into_tensor(view, torch.full((2,), float(rank)))
    assert torch.equal(view, torch.arange(float(n))[:, None].expand(n, 2))
    with torch.inference_mode():
        inferred = torch.full((2,), rank + 1.0)
        dist.all_reduce(inferred, async_op=True).wait()
        strange = torch.full((2, 2), rank + 1.0).t()
        dist.all_reduce(strange, async_op=True).wait()
    assert inferred.tolist() == [total, total]
    assert torch.equal(strange, torch.full((2, 2), float(total)))
    odd = torch.full((1,), rank + 1.0, dtype=torch.bfloat16).as_strided((1,), (5,))  # contiguous, whatever its stride
    dist.all_reduce(odd)
    assert odd.item() == total
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_layout_a_tensor_can_have(world_size):
    assert all(pool.run(world_size, _layouts))


def _versions(group):
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    before = y._version
    dist.all_reduce(y.detach(), async_op=True).wait()
    y.sum().backward()
    return before == y._version, x.grad.tolist()


def test_writing_a_result_does_not_disturb_autograd():
    assert pool.run(2, _versions) == [(True, [2.0] * 3)] * 2


def _aliases(group):
    rank, n = group.rank, group.world_size
    whole = torch.zeros(n, 2)
    whole[rank] = rank + 1
    dist.all_gather_into_tensor(whole, whole[rank])  # FSDP gathers into the buffer that holds its share
    assert torch.equal(whole, torch.arange(1.0, n + 1)[:, None].expand(n, 2))
    source = torch.arange(2.0 * n) + rank
    dist.reduce_scatter_tensor(source[2 * rank : 2 * rank + 2], source)
    expected = sum(torch.arange(2.0 * n) + r for r in range(n))
    assert torch.equal(source[2 * rank : 2 * rank + 2], expected[2 * rank : 2 * rank + 2])
    return True


def test_outputs_inside_inputs():
    assert all(pool.run(3, _aliases))


def _sparse(group):
    rank, n = group.rank, group.world_size
    dense = [torch.zeros(6, 2) for _ in range(n)]
    for r in range(n):
        dense[r][r : 2 * r + 1] = r + 1.0
    x = dense[rank].to_sparse(1)
    dist.all_reduce(x)
    assert torch.equal(x.to_dense(), sum(dense))
    with pytest.raises(ValueError, match="only be reduced with SUM"):
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return True


def test_sparse_tensors_with_different_numbers_of_entries():
    assert all(pool.run(3, _sparse))


# ---------------------------------------------------------------------- mixed dtypes


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


# ---------------------------------------------------------------------- the same bits as Comm


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


# ---------------------------------------------------------------------- c10d called by hand


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
