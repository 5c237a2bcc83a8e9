"""Training over islands, in processes: DDP, FSDP2 and HSDP. Plain hostring is the oracle for losses."""

from __future__ import annotations

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import Pool, pool  # noqa: E402
from torch_training import F32_ROUNDING, model, same_everywhere, train  # noqa: E402

import hostring  # noqa: E402
from hostring.integrations.torch_backend import Options  # noqa: E402

STEPS = 4


def _trainings(group, device="cpu"):
    """Losses and parameters of DDP, FSDP2 and HSDP; and what kinds of groups a mesh of islands has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if device == "cuda":
        torch.cuda.set_device(group.rank)
    n, per_island = group.world_size, group.world_size // 2
    ddp = nn.parallel.DistributedDataParallel(model().to(device), bucket_cap_mb=0.002)
    ddp_losses = train(ddp, group.rank, STEPS, device)
    sharded = fully_shard(model().to(device), mesh=init_device_mesh(device, (n,)))
    fsdp_losses = train(sharded, group.rank, STEPS, device)
    mesh = init_device_mesh(device, (2, per_island), mesh_dim_names=("between", "inside"))
    hybrid = fully_shard(model().to(device), mesh=mesh)
    hsdp_losses = train(hybrid, group.rank, STEPS, device)
    parameters = [p.detach().cpu() for p in ddp.parameters()]
    parameters += [p.full_tensor().detach().cpu() for net in (sharded, hybrid) for p in net.parameters()]
    by_hand = init_device_mesh(device, (2, per_island), mesh_dim_names=("b", "i"), backend_override={"i": "gloo"})
    assert dist.get_backend(by_hand["i"].get_group()) == "gloo"
    assert dist.get_backend(by_hand["b"].get_group()) == "hostring"
    kinds = [type(mesh[name].get_group()).__module__.split(".")[0] for name in ("between", "inside")]
    return ddp_losses + fsdp_losses + hsdp_losses, parameters, kinds


def _same_as_plain(n, inners, device="cpu"):
    plain = pool.run(n, _trainings, device, pg_options=Options(inner="off"))
    for inner in inners:
        ours = pool.run(n, _trainings, device, pg_options=Options(inner=inner, island_size=n // 2))
        same_everywhere([parts[:2] for parts in ours])
        for (a, _, kinds), (b, _, _) in zip(ours, plain, strict=True):
            assert a == pytest.approx(b, rel=F32_ROUNDING, abs=F32_ROUNDING)
            # islands are the library itself, and one rank of each island is plain hostring
            assert kinds == ["hostring", "hostring" if inner == "hostring" else "torch"]
        assert ours[0][0][STEPS - 1] < ours[0][0][0]


def test_losses_over_two_islands_of_two():
    _same_as_plain(4, ["gloo", "hostring"])


@pytest.mark.slow
def test_losses_over_two_islands_of_three():
    _same_as_plain(6, ["gloo", "hostring"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than 4 CUDA or ROCm devices")
def test_losses_on_gpus():
    _same_as_plain(4, ["nccl", "auto"], "cuda")


def _on_a_device(group):
    """The simulated device has no library: its tensors take gloo's way over the host, or hostring's own."""
    import fake_device

    fake_device.install()
    rank, n = group.rank, group.world_size
    x = torch.arange(7.0).to("fake")
    x.mul_(rank + 1)  # queued, not done
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    part = torch.empty(1, device="fake")
    dist.reduce_scatter_single(part, torch.arange(float(n)).to("fake"))
    gathered = torch.empty(n, device="fake")
    dist.all_gather_single(gathered, part)
    dist.broadcast(part, 3)
    return x.tolist(), gathered.tolist(), part.item()


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["gloo", "hostring", "auto"])
def test_on_a_device(inner):
    devices = Pool()  # of its own: the device stays with its workers
    try:
        for got in devices.run(4, _on_a_device, pg_options=Options(inner=inner, island_size=2)):
            assert got == ([10.0 * k for k in range(7)], [0.0, 4.0, 8.0, 12.0], 12.0)
    finally:
        devices.stop()


def _until_killed(group, victim, folder):
    x = torch.ones(1 << 16)
    try:
        for step in range(10_000):
            if group.rank == victim and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(x.fill_(1.0))
    except hostring.HostringError as exc:
        (folder / str(group.rank)).write_text(str(exc.rank), encoding="utf-8")
        time.sleep(2)
    return None


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("inner", ["gloo", "hostring"])
def test_a_killed_rank_is_named_on_all(inner, tmp_path):
    ranks = Pool()
    try:
        with pytest.raises(AssertionError, match="rank 3: exit code -9"):
            ranks.run(4, _until_killed, 3, tmp_path, pg_options=Options(inner=inner, island_size=2))
    finally:
        ranks.stop()
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == dict.fromkeys("012", "3")
