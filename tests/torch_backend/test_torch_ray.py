"""hostring as the backend of Ray Train, and between Ray actors. Runs with `-m ray`, where Ray is installed."""

from __future__ import annotations

import os
import runpy
import socket
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def cluster():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.timeout(300)
def test_ray_train(cluster, capsys, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "torch_ray.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "'backend': 'hostring'" in out
    assert "'workers': 2" in out


@pytest.mark.timeout(300)
def test_ray_actors(cluster):
    import ray

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    @ray.remote(num_cpus=1)
    class Worker:
        def step(self, rank: int) -> tuple[str, list[float]]:
            import torch
            import torch.distributed as dist

            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            dist.init_process_group("hostring", rank=rank, world_size=2)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
            torch.nn.init.ones_(model.module.weight)
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            return dist.get_backend(), model.module.weight.grad.flatten().tolist()

    workers = [Worker.remote() for _ in range(2)]
    assert (
        ray.get([w.step.remote(r) for r, w in enumerate(workers)], timeout=120) == [("hostring", [1.5, 1.5, 1.5])] * 2
    )
