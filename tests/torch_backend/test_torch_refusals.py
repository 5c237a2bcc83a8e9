"""Tensors that a collective can't take are refused by name on every rank, whatever the call; the group goes on."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_ranks import pool  # noqa: E402


def plain():
    return torch.ones(4)


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=layout)


KINDS = {
    "meta": lambda: torch.ones(4, device="meta"),
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "sparse": lambda: torch.ones(4).to_sparse(),
    "sparse rows": lambda: torch.ones(2, 2).to_sparse_csr(),
    "expanded": lambda: torch.ones(1).expand(4),
}


def calls(make, rank, n):
    """Calls with a tensor as input, and with one as output."""
    mine = lambda one: [one() for _ in range(n)]  # noqa: E731
    rooted = lambda one: mine(one) if rank == 0 else None  # noqa: E731
    into = {
        "all_gather": lambda: dist.all_gather([make(), *mine(plain)[1:]], plain()),
        "all_gather_single": lambda: dist.all_gather_single(make(), torch.ones(4 // n)),
        "reduce_scatter": lambda: dist.reduce_scatter(make(), mine(plain)),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(make(), torch.ones(4 * n)),
        "scatter": lambda: dist.scatter(make(), rooted(plain)),
        "all_to_all": lambda: dist.all_to_all(mine(make), mine(plain)),
        "all_to_all_single": lambda: dist.all_to_all_single(make(), plain()),
        "recv": lambda: dist.recv(make(), (rank + 1) % n),
    }
    read = {
        "all_reduce": lambda: dist.all_reduce(make(), op=dist.ReduceOp.MAX),
        "all_reduce later": lambda: dist.all_reduce(make(), op=dist.ReduceOp.MAX, async_op=True).wait(),
        "reduce": lambda: dist.reduce(make(), 0),
        "broadcast": lambda: dist.broadcast(make(), 0),
        "all_gather in": lambda: dist.all_gather(mine(plain), make()),
        "reduce_scatter in": lambda: dist.reduce_scatter(plain(), mine(make)),
        "gather": lambda: dist.gather(make(), rooted(plain)),
        "all_to_all in": lambda: dist.all_to_all(mine(plain), mine(make)),
        "all_to_all_single in": lambda: dist.all_to_all_single(plain(), make()),
        "send": lambda: dist.send(make(), (rank + 1) % n),
    }
    return into, read


def _refused(group, kind):
    warnings.simplefilter("ignore")
    into, read = calls(KINDS[kind], group.rank, group.world_size)
    accepted = {}
    for name, call in {**into, **({} if kind == "expanded" else read)}.items():
        try:
            call()
        except (TypeError, ValueError) as exc:
            words = str(exc)
            if "can't travel" not in words and "share memory" not in words and "can only be reduced" not in words:
                accepted[name] = words
        except Exception as exc:
            accepted[name] = repr(exc)
        else:
            accepted[name] = "no error"
    if kind == "expanded":
        scaled = dist._make_nccl_premul_sum(2.0)
        for call in (
            lambda: dist.all_reduce(KINDS[kind](), op=scaled),
            lambda: dist.reduce(KINDS[kind](), 0, op=scaled),
        ):
            with pytest.raises(ValueError, match="share memory"):
                call()
    x = torch.ones(2)
    dist.all_reduce(x)
    return accepted, x.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_values_or_places_are_refused_in_every_call(kind):
    assert pool.run(2, _refused, kind) == [({}, [2.0, 2.0])] * 2


def _no_rows(group):
    for output, input in ((torch.tensor(0.0), torch.ones(2)), (torch.ones(2), torch.tensor(0.0))):
        with pytest.raises(TypeError, match="0-d tensor, which has no rows"):
            dist.all_to_all_single(output, input)
    return True


def test_a_0d_tensor_has_no_rows_for_all_to_all():
    assert all(pool.run(2, _no_rows))


def _expanded_gradient(group):
    """What autograd hands to a custom function for a sum is an expanded tensor."""

    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            assert gradient.stride() == (0,)
            dist.all_reduce(gradient)
            work = dist.all_reduce(gradient, async_op=True)
            work.wait()
            return gradient

    x = torch.ones(5, requires_grad=True)
    (Shared.apply(x).sum() * (group.rank + 1)).backward()
    same = (torch.arange(3.0) + group.rank)[:, None].expand(3, 2)
    dist.broadcast(same, group.world_size - 1)
    return x.grad.tolist(), same.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_expanded_gradient_is_reduced(world_size):
    total = float(sum(range(1, world_size + 1)))
    rows = [[k + world_size - 1.0] * 2 for k in range(3)]
    assert pool.run(world_size, _expanded_gradient) == [([world_size * total] * 5, rows)] * world_size
