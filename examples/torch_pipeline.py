"""Pipeline parallel over hostring: each rank has some layers, and micro-batches pass through them in turn (1F1B).

    torchrun --nproc-per-node 2 examples/torch_pipeline.py

prints

    step   0  loss 0.4679
    step  25  loss 0.2631
    step  50  loss 0.2141
    step  75  loss 0.1742
    step 100  loss 0.1616
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B


def main() -> None:
    dist.init_process_group("hostring")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == world_size - 1
    torch.manual_seed(rank)
    layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    stage = PipelineStage(layers, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)  # the first rank needs the inputs, the last one the targets
    for step in range(101):
        x = torch.randn(64, 32, generator=data)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if first:
            schedule.step(x)
        elif last:
            schedule.step(target=x.sin(), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        if last and step % 25 == 0:
            print(f"step {step:3d}  loss {torch.stack(losses).mean().item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
