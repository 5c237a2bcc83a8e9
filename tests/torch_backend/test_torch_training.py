"""Training over hostring: FSDP, pipelines, tensor parallel, checkpoints. Gloo is the oracle for losses."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import pool  # noqa: E402
from torch_training import F32_ROUNDING, model, same_everywhere, train  # noqa: E402

# ---------------------------------------------------------------------- FSDP2


def _fsdp(group, mixed=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (group.world_size,))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if mixed
        else MixedPrecisionPolicy()
    )
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    losses = train(net, group.rank)
    return losses, [p.full_tensor().detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp2_losses_are_gloos_and_bit_identical_in_every_topology(world_size):
    ours = pool.run(world_size, _fsdp)
    theirs = pool.run(world_size, _fsdp, backend="gloo")
    same_everywhere(ours)
    for (a, _), (b, _) in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=F32_ROUNDING, abs=F32_ROUNDING)
        assert a[-1] < a[0]
    for topology in ("ring", "star"):
        again = pool.run(world_size, _fsdp, env={"HOSTRING_TOPOLOGY": topology})
        assert [a for a, _ in again] == [a for a, _ in ours]
        assert all(torch.equal(x, y) for x, y in zip(again[0][1], ours[0][1], strict=True))


def test_fsdp2_with_bfloat16_parameters():
    ours, theirs = pool.run(2, _fsdp, True), pool.run(2, _fsdp, True, backend="gloo")
    assert ours[0][0] == pytest.approx(theirs[0][0], rel=2e-2)


def _fsdp1(group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    return train(net, group.rank, 5)


def test_fsdp1():
    assert pool.run(2, _fsdp1) == [pytest.approx(row, rel=F32_ROUNDING) for row in pool.run(2, _fsdp1, backend="gloo")]


def _hsdp(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return train(net, group.rank, 4)


def test_hybrid_sharding_on_a_mesh():
    assert pool.run(4, _hsdp) == [pytest.approx(row, rel=F32_ROUNDING) for row in pool.run(4, _hsdp, backend="gloo")]


# ---------------------------------------------------------------------- tensor parallel


def _tensor_parallel(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    mesh = init_device_mesh("cpu", (group.world_size,))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
    torch.manual_seed(0)
    split = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(3))
    expected, got = plain(x), split(x)
    expected.square().mean().backward()
    got.square().mean().backward()
    assert torch.allclose(got, expected, atol=1e-6)
    for p, q in zip(plain.parameters(), split.parameters(), strict=True):
        assert torch.allclose(q.grad.full_tensor(), p.grad, atol=1e-6)

    norm = nn.Sequential(nn.LayerNorm(12))
    parallelize_module(norm, mesh, {"0": SequenceParallel()})
    sequence = torch.randn(1, 2 * group.world_size, 12, generator=torch.Generator().manual_seed(4))
    mine = DTensor.from_local(sequence.chunk(group.world_size, 1)[group.rank], mesh, [Shard(1)])
    assert torch.allclose(norm(mine).full_tensor(), nn.functional.layer_norm(sequence, (12,)), atol=1e-6)

    whole = torch.arange(7.0 * 4).view(7, 4)  # 7 rows over the ranks: uneven
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert (rows.sum().full_tensor() == whole.sum()).item()
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_dtensor_and_parallelize_module(world_size):
    assert all(pool.run(world_size, _tensor_parallel))


# ---------------------------------------------------------------------- pipelines


def _pipeline(group, name):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
    from torch.distributed.pipelining.schedules import Schedule1F1B

    rank, n = group.rank, group.world_size
    torch.manual_seed(0)
    per_rank = 2 if name == "interleaved" else 1
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n * per_rank)]
    whole = nn.Sequential(*[nn.Sequential(*b) for b in blocks])
    x = torch.randn(4 * n, 8, generator=torch.Generator().manual_seed(1))
    y = torch.randn(4 * n, 8, generator=torch.Generator().manual_seed(2))
    device = torch.device("cpu")
    mine = [PipelineStage(blocks[rank + k * n], rank + k * n, n * per_rank, device) for k in range(per_rank)]
    kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    stage = mine if per_rank > 1 else mine[0]
    schedule = kinds[name](stage, n_microbatches=2 * n, loss_fn=nn.functional.mse_loss)
    losses = []
    if rank == 0:
        schedule.step(x)
    elif rank == n - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    grads = [p.grad.clone() for k in range(per_rank) for p in blocks[rank + k * n].parameters()]
    for p in whole.parameters():
        p.grad = None
    nn.functional.mse_loss(whole(x), y).backward()
    expected = [p.grad for k in range(per_rank) for p in blocks[rank + k * n].parameters()]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads, expected, strict=True))
    return len(losses)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_pipeline_schedules(world_size, name):
    assert pool.run(world_size, _pipeline, name)[-1] == 2 * world_size


# ---------------------------------------------------------------------- checkpoints


def _checkpoint(group, asynchronous):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (group.world_size,))
    net = fully_shard(model(), mesh=mesh)
    train(net, group.rank, 2)
    before = [p.full_tensor().detach().clone() for p in net.parameters()]
    path = os.path.join(group.folder, "checkpoint")
    state = {"model": get_model_state_dict(net)}
    if asynchronous:
        # saving happens in a thread, so it needs a group that this thread doesn't use meanwhile
        done = dcp.async_save(state, checkpoint_id=path, process_group=dist.new_group())
        train(net, group.rank, 2)
        done.result(timeout=60)
    else:
        dcp.save(state, checkpoint_id=path)
    fresh = fully_shard(model(), mesh=mesh)
    loaded = {"model": get_model_state_dict(fresh)}
    dcp.load(loaded, checkpoint_id=path)
    set_model_state_dict(fresh, loaded["model"])
    after = [p.full_tensor().detach().clone() for p in fresh.parameters()]
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_distributed_checkpoint(world_size, asynchronous):
    assert all(pool.run(world_size, _checkpoint, asynchronous))
