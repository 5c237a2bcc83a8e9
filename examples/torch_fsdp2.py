"""Sharded training with FSDP2 over hostring: each rank holds its share of parameters, gradients and optimizer state.

    torchrun --nproc-per-node 2 examples/torch_fsdp2.py

prints

    rank 0 holds 16865 of 33697 parameters
    rank 1 holds 16832 of 33697 parameters
    step   0  loss 13.5732
    step  25  loss 5.5793
    step  50  loss 0.1817
    step  75  loss 0.0127
    step 100  loss 0.0011
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    dist.init_process_group("hostring")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(32) for _ in range(4)], nn.Linear(32, 1))
    whole = sum(p.numel() for p in model.parameters())
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = sum(p.to_local().numel() for p in model.parameters())
    print(f"rank {rank} holds {held} of {whole} parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1 + rank))  # every rank has its own data
    for step in range(101):
        loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            mean = loss.detach()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step:3d}  loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
