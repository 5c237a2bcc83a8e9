"""Ray Train with hostring between the workers: one machine or many, started and watched by Ray.

    pip install "ray[train]"
    python examples/torch_ray.py

prints

    {'backend': 'hostring', 'workers': 2, 'steps': 20, 'loss': 0.0089}
"""

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn


def train_loop() -> dict[str, object]:
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(8, 1))  # wraps it in DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return {"backend": dist.get_backend(), "workers": dist.get_world_size(), "steps": 20, "loss": round(mean.item(), 4)}


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train_loop,
        torch_config=TorchConfig(backend="hostring"),
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
    )
    print(trainer.fit().return_value)
    ray.shutdown()


if __name__ == "__main__":
    main()
