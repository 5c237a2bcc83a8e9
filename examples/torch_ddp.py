"""Data-parallel training over hostring: an ordinary DDP script. The name of the backend is the only difference.

    torchrun --nproc-per-node 2 examples/torch_ddp.py

prints

    step   0  loss 6.2099
    step  50  loss 1.0772
    step 100  loss 0.8281
    step 150  loss 0.8990
    step 200  loss 0.5039
    parameters are the same on all ranks: True
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("hostring")  # was "gloo"
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1 + rank)  # every rank has its own batches
    for step in range(201):
        x = torch.randn(256, 16, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            mean = loss.detach()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step:3d}  loss {mean.item():.4f}")
    digest = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum()
    digests = [torch.zeros_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    if rank == 0:
        print(f"parameters are the same on all ranks: {len({d.item() for d in digests}) == 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
