"""Tensors outside host memory. A fake device stands in for accelerators; `-m gpu` tests a real one."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_ranks import Pool  # noqa: E402

pool = Pool()  # of its own: the device stays with its workers


@pytest.fixture(scope="module", autouse=True)
def _stop():
    yield
    pool.stop()


def on(device: str, values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


def _everything(group, device):
    if device == "fake":
        import fake_device

        fake_device.install()
    _lists_and_reductions(group, device)
    _rooted_and_messages(group, device)
    return True


def _lists_and_reductions(group, device):
    rank, n = group.rank, group.world_size
    x = on(device, [rank + 1.0, 2.0 * rank])
    dist.all_reduce(x)
    assert x.device.type == device
    assert x.tolist() == [sum(range(1, n + 1)), n * (n - 1)]
    y = on(device, [float(rank)] * 3, torch.bfloat16)
    dist.broadcast(y, 1)
    assert y.tolist() == [1.0] * 3
    outs = [torch.empty(2, device=device) for _ in range(n)]
    dist.all_gather(outs, on(device, [rank, rank + 0.5]))
    assert [o.tolist() for o in outs] == [[r, r + 0.5] for r in range(n)]
    whole = torch.empty(2 * n, device=device)
    dist.all_gather_into_tensor(whole, on(device, [rank, rank + 0.5]))
    assert whole.tolist() == [v for r in range(n) for v in (r, r + 0.5)]
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, on(device, [float(k + rank) for k in range(2 * n)]))
    assert part.tolist() == [n * (2 * rank + k) + n * (n - 1) / 2 for k in range(2)]
    dist.reduce_scatter(part, [on(device, [float(k), 1.0]) for k in range(n)])
    assert part.tolist() == [n * rank, n]
    received = [torch.empty(2, device=device) for _ in range(n)]
    dist.all_to_all(received, [on(device, [10.0 * rank + k, 1.0]) for k in range(n)])
    assert [r.tolist() for r in received] == [[10.0 * k + rank, 1.0] for k in range(n)]
    exchanged = torch.empty(n, device=device)
    dist.all_to_all_single(exchanged, on(device, [10.0 * rank + k for k in range(n)]))
    assert exchanged.tolist() == [10.0 * k + rank for k in range(n)]


def _rooted_and_messages(group, device):
    rank, n = group.rank, group.world_size
    gathered = [torch.empty(1, device=device) for _ in range(n)] if rank == 0 else None
    dist.gather(on(device, [float(rank)]), gathered, dst=0)
    assert gathered is None or [g.item() for g in gathered] == list(range(n))
    one = torch.empty(1, device=device)
    dist.scatter(one, [on(device, [5.0 + r]) for r in range(n)] if rank == 0 else None, src=0)
    assert one.item() == 5.0 + rank
    if rank == 0:
        dist.send(on(device, [1.0, 2.0]), 1)
    elif rank == 1:
        got = torch.empty(2, device=device)
        dist.recv(got, 0)
        assert got.tolist() == [1.0, 2.0]
    objects = [None] * n
    dist.all_gather_object(objects, rank)
    assert objects == list(range(n))
    dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_on_a_device(world_size):
    assert all(pool.run(world_size, _everything, "fake"))


def _mixed_devices(group):
    """Rank 0 has an accelerator and float16, rank 1 a CPU and bfloat16."""
    import fake_device

    fake_device.install()
    device, dtype = [("fake", torch.float16), ("cpu", torch.bfloat16)][group.rank]
    x = on(device, [1.5 + group.rank, -2.0], dtype)
    dist.all_reduce(x)
    outs = [torch.empty(2, dtype=dtype, device=device) for _ in range(2)]
    dist.all_gather(outs, x)
    return x.tolist(), [o.tolist() for o in outs]


def test_ranks_with_different_devices_and_dtypes():
    assert pool.run(2, _mixed_devices) == [([4.0, -4.0], [[4.0, -4.0], [4.0, -4.0]])] * 2


def _ordered(group):
    import fake_device

    fake_device.install()
    x = on("fake", [1.0])
    fake_device.log.clear()
    x.mul_(3)  # queued, not done
    work = dist.all_reduce(x, async_op=True)
    give_up = time.monotonic() + 20
    while (
        not work.is_completed() and time.monotonic() < give_up
    ):  # on the group's own thread, whose current stream is another
        time.sleep(0.001)
    work.wait()
    order = list(fake_device.log)
    x.mul_(2)
    dist.all_reduce(x)  # here, on this thread's stream
    return x.item(), order


def test_queued_kernels_come_first():
    for value, order in pool.run(2, _ordered):
        assert value == (3 * 2) * 2 * 2
        assert order == ["record", "wait", "synchronize"]


def _future(group):
    import fake_device

    fake_device.install()
    x = on("fake", [2.0])
    return dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0].cpu()).wait().item()


def test_futures_of_device_tensors():
    assert pool.run(2, _future) == [4.0, 4.0]


def _split(group):
    """With an accelerator, torch.distributed.split_group asks the backend."""
    import fake_device

    fake_device.install()
    dist.group.WORLD.bound_device_id = torch.device("fake:0")  # as `init_process_group(device_id=)` does
    child = dist.split_group(split_ranks=[[0, 1], [2]])
    x = on("fake", [group.rank + 1.0])
    dist.all_reduce(x, group=child)
    return x.item(), dist.get_world_size(child)


def test_split_group_on_a_device():
    assert pool.run(3, _split) == [(3.0, 2), (3.0, 2), (3.0, 1)]


# ---------------------------------------------------------------------- on a real GPU


def _streams(group):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(1 << 20, device="cuda")
        for _ in range(200):
            x = x * 1.0
        x += group.rank
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        total = (x * 1.0).sum()
    side.synchronize()
    return total.item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")
@pytest.mark.parametrize("what", ["everything", "streams"])
def test_on_a_gpu(what):
    if what == "everything":
        assert all(pool.run(2, _everything, "cuda"))
    else:
        assert pool.run(2, _streams) == [3.0 * (1 << 20)] * 2
