"""Strided, overlapping, sparse and differentiated tensors."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_ranks import pool  # noqa: E402


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


def test_a_tensor_whose_negation_is_pending_travels_negated():
    from hostring.arrays.staging import adapter_for

    x = torch._neg_view(torch.tensor([1.0, -2.0, 3.0]))
    assert x.is_neg()
    assert x.is_contiguous()
    host = np.empty(3, np.float32)
    view = adapter_for(x).view(x)
    if view is None:
        adapter_for(x).stage(x, host)
    else:
        host[...] = view
    np.testing.assert_array_equal(host, [-1, 2, -3])
