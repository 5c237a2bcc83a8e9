"""torch's send, recv and batches of both."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_ranks import pool  # noqa: E402


def _messages(group):
    rank, n = group.rank, group.world_size
    right, left = (rank + 1) % n, (rank - 1) % n
    big = torch.full((300_000,), float(rank))
    got = torch.empty(300_000)
    sent = dist.isend(big, right)  # more than the links hold: everybody sends first
    dist.recv(got, left)
    sent.wait()
    assert got[0] == got[-1] == left
    first, second = torch.zeros(1), torch.zeros(1)
    works = [dist.irecv(second, left, tag=2), dist.irecv(first, left, tag=1)]
    for tag in (1, 2):
        dist.send(torch.full((1,), 10.0 * tag + rank), right, tag=tag)
    for work in works:
        work.wait()
    assert (first.item(), second.item()) == (10 + left, 20 + left)
    dist.barrier()
    if rank == 0:
        sources = []
        for _ in range(n - 1):
            x = torch.zeros(1)
            sources.append((dist.recv(x, tag=9), x.item()))
        assert sorted(sources) == [(r, 7.0 * r) for r in range(1, n)]
    else:
        dist.send(torch.full((1,), 7.0 * rank), 0, tag=9)
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages(world_size):
    assert all(pool.run(world_size, _messages))


def _batches_and_layouts(group):
    rank, n = group.rank, group.world_size
    right, left = (rank + 1) % n, (rank - 1) % n
    polled = torch.zeros(2)
    work = dist.irecv(polled, left, tag=3)
    dist.isend(torch.full((2,), float(rank)), right, tag=3)
    give_up = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < give_up:
        time.sleep(0.001)
    assert polled.tolist() == [left, left]
    out, inc = torch.full((4,), float(rank)), torch.zeros(4)
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, inc, left)]):
        request.wait()
    assert inc.tolist() == [left] * 4
    columns = torch.zeros(3, 2).t()
    send = dist.isend(torch.full((3, 2), float(rank)).t(), right)
    dist.recv(columns, left)
    send.wait()
    assert torch.equal(columns, torch.full((2, 3), float(left)))
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_and_layouts_of_messages(world_size):
    assert all(pool.run(world_size, _batches_and_layouts))


def _unattended(group):
    """A large send that nobody waits for goes on while this rank computes, or sits in a collective."""
    if group.rank == 0:
        dist.isend(torch.ones(2_000_000), 1)
        dist.barrier()
        return True
    got = torch.zeros(2_000_000)
    dist.recv(got, 0)
    dist.barrier()
    return bool(got.min() == 1)


def test_a_send_that_nobody_waits_for_goes_on():
    assert pool.run(2, _unattended) == [True, True]
