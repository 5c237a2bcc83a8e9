"""Tensor parallel with DTensor over hostring: a feed-forward block split by column and by row, compared with the whole.

    torchrun --nproc-per-node 2 examples/torch_tensor_parallel.py

prints

    of (256, 64) the ranks hold [(128, 64), (128, 64)]
    collectives: 1, largest difference from the whole block: 3.0e-08
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def main() -> None:
    dist.init_process_group("hostring")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, split = block(), block()
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), CommDebugMode() as seen:
        got = split(x)
    difference = (got - whole(x)).abs().max().item()
    shapes: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, tuple(split[0].weight.to_local().shape))
    if rank == 0:
        print(f"of {tuple(whole[0].weight.shape)} the ranks hold {shapes}")
        print(f"collectives: {seen.get_total_counts()}, largest difference from the whole block: {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
