"""Checkpoints that are written while training goes on: `async_save` over hostring, in a group of its own.

    torchrun --nproc-per-node 2 examples/torch_async_checkpoint.py

prints

    step  0  loss 16.1669
    step 20  loss 3.4163, checkpoint of step 10 is written
    step 40  loss 0.9605, checkpoint of step 30 is written
    the checkpoint holds the parameters of step 30 on both ranks: True
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("hostring")
    saving = dist.new_group(backend="hostring")  # async_save calls collectives on a thread of its own
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1 + rank))  # every rank has its own data
    saved, written, message = {}, None, ""
    for step in range(41):
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        if step % 20 == 10:
            saved = {name: p.detach().clone() for name, p in model.module.named_parameters()}
            written = dcp.async_save(saved, checkpoint_id=f"{folder[0]}/{step}", process_group=saving)
        optimizer.step()
        if step % 20 == 0:
            if written is not None:
                written.result()
                message = f", checkpoint of step {step - 10} is written"
            mean = loss.detach()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step:2d}  loss {mean.item():.4f}{message}", flush=True)
    loaded = {name: torch.empty_like(p) for name, p in saved.items()}
    dcp.load(loaded, checkpoint_id=f"{folder[0]}/30")
    same = torch.tensor(all(torch.equal(loaded[name], p) for name, p in saved.items()))
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if rank == 0:
        print(f"the checkpoint holds the parameters of step 30 on both ranks: {bool(same)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
