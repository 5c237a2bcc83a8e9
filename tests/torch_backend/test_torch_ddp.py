"""Data-parallel training over hostring: DDP and ZeRO. Gloo is the oracle for losses."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import pool  # noqa: E402
from torch_training import F32_ROUNDING, batches, model, same_everywhere, train  # noqa: E402

from hostring.integrations.torch_backend import Options  # noqa: E402


def _ddp(group, hook=None):
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.002)  # several buckets
    if hook == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        state = powersgd.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        net = nn.parallel.DistributedDataParallel(model())  # one bucket: more would race in the hook's own callbacks
        net.register_comm_hook(state, powersgd.powerSGD_hook)
    elif hook is not None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        net.register_comm_hook(dist.group.WORLD, getattr(default_hooks, hook))
    losses = train(net, group.rank)
    return losses, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("hook", [None, "fp16_compress_hook", "powersgd"])
def test_ddp_losses_are_gloos(world_size, hook):
    ours = pool.run(world_size, _ddp, hook)
    theirs = pool.run(world_size, _ddp, hook, backend="gloo")
    same_everywhere(ours)
    tolerance = {None: F32_ROUNDING, "fp16_compress_hook": 2e-2, "powersgd": 1e-3}[hook]  # gloo adds in float16
    for (a, _), (b, _) in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
        assert a[-1] < a[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_is_bit_identical_whatever_the_topology(world_size):
    first = pool.run(world_size, _ddp)
    for topology in ("mesh", "ring", "star", "auto"):
        again = pool.run(world_size, _ddp, pg_options=Options(topology=topology))
        for (a, p), (b, q) in zip(first, again, strict=True):
            assert a == b
            assert all(torch.equal(x, y) for x, y in zip(p, q, strict=True))


def _unlike(group, kind):
    """Rank 1 builds DDP over other parameters: the error of each rank's constructor."""
    net = {"shape": nn.Linear(3, 4 if group.rank == 1 else 2), "number": nn.Linear(3, 2, bias=group.rank != 1)}[kind]
    try:
        nn.parallel.DistributedDataParallel(net)
    except RuntimeError as exc:
        return str(exc)
    return "no error"


@pytest.mark.parametrize("kind", ["shape", "number"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_over_unlike_parameters_fails_on_every_rank(world_size, kind):
    errors = pool.run(world_size, _unlike, kind)
    for rank, words in enumerate(errors):
        if kind == "number":
            assert "expects same model across all ranks" in words
        elif rank == 1:
            assert "appears not to match sizes of the same param in process 0" in words
        else:
            assert "DDP: rank 1 brought other parameters" in words
            assert "[4, 3]" in words


def _join(group):
    from torch.distributed.algorithms.join import Join

    net = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    steps = 0
    with Join([net]):
        for x, y in batches(group.rank, 3 + 2 * group.rank):  # a different number of batches on every rank
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            steps += 1
    return steps, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_join_with_uneven_inputs(world_size):
    by_rank = pool.run(world_size, _join)
    assert [steps for steps, _ in by_rank] == [3 + 2 * r for r in range(world_size)]
    same_everywhere(by_rank)


def _buffers(group):
    """BatchNorm buffers are broadcast; SyncBatchNorm is for GPUs only."""
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    train(net, group.rank, 3)
    net.eval()
    return net.module(torch.ones(1, 12)).flatten().tolist()


def test_ddp_with_buffers():
    assert pool.run(2, _buffers)[0] == pytest.approx(pool.run(2, _buffers, backend="gloo")[0], rel=1e-5)


def _zero(group):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    losses = []
    for x, y in batches(group.rank, 5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in net.parameters()]


def test_zero_redundancy_optimizer():
    ours, theirs = pool.run(2, _zero), pool.run(2, _zero, backend="gloo")
    same_everywhere(ours)
    assert ours[0][0] == pytest.approx(theirs[0][0], rel=F32_ROUNDING)


def _with_feedback(group):
    """Losses, parameters, and whether a state that was saved halfway goes on as the first one did."""
    from hostring.integrations.torch_pg import FeedbackState, feedback_hook

    ways = []
    for halves in ((20,), (10, 10)):
        net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.002)
        state = FeedbackState(net.parameters())
        net.register_comm_hook(state, feedback_hook)
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
        data = iter(batches(group.rank))
        for steps in halves:
            state.load_state_dict(state.state_dict())
            for _ in range(steps):
                x, y = next(data)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        ways.append((losses, [p.detach().clone() for p in net.parameters()]))
    return ways


def test_feedback_over_a_lossy_wire():
    exact = pool.run(2, _with_feedback)
    lossy = pool.run(2, _with_feedback, pg_options=Options(wire="mxfp4"))
    same_everywhere([ways[0] for ways in lossy])
    for (one, other), (plain, _) in zip(lossy, exact, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
        assert one[0] != plain[0]
        assert one[0][-1] == pytest.approx(plain[0][-1], rel=0.05)
