#!/usr/bin/env python3
"""What torch.distributed adds to an all-reduce: the same tensor through `Comm` and `dist.all_reduce`, in turns.

    python benchmarks/torch_path.py                       # two ranks, pinned, TCP
    python benchmarks/torch_path.py --transport shm --dtype bfloat16

Four ways, in interleaved rounds on one group: `Comm.all_reduce`; the process group's own method, as torch calls it;
`dist.all_reduce`; and, for what of it is torch's, `dist.all_reduce` on a group that does nothing, followed by
`Comm.all_reduce`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from hostring.launch.cores import pin
from hostring.launch.ranks import launch

WAYS = ("Comm.all_reduce", "torch's wrapper, then Comm", "process group", "dist.all_reduce")


def work(options: argparse.Namespace) -> None:
    """A rank."""
    rank = int(os.environ["RANK"])
    pin(rank)
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    torch.set_num_threads(1)
    dist.init_process_group("hostring")
    world = dist.distributed_c10d._world
    group: Any = world.default_pg
    comm, nothing, blocking = group.comm, _nothing(dist), c10d.AllreduceOptions()
    blocking.asyncOp = False
    if rank == 0:
        print(
            f"{options.ranks} ranks, transport {options.transport}, {options.dtype}; "
            "median us, and above Comm.all_reduce"
        )
        print(f"{'elements':>9}" + "".join(f"  {way:>26}" for way in WAYS))
    for n_elements in map(int, options.elements.split(",")):
        x = torch.zeros(n_elements, dtype=getattr(torch, options.dtype))

        def wrapper_then_comm(x: Any = x) -> None:
            world.default_pg = nothing
            dist.all_reduce(x)
            world.default_pg = group
            comm.all_reduce(x)

        by_comm, by_group = partial(comm.all_reduce, x), partial(group.allreduce, [x], blocking)
        calls: tuple[Callable[[], Any], ...] = (by_comm, wrapper_then_comm, by_group, partial(dist.all_reduce, x))
        rounds = [[_median(comm, call, options.calls) for call in calls] for _ in range(options.rounds)]
        times = [statistics.median(column) * 1e6 for column in zip(*rounds, strict=True)]
        if rank == 0:
            cells = "".join(f"  {t:>14.1f} {f'(+{t - times[0]:.1f})' if k else '':>11}" for k, t in enumerate(times))
            print(f"{n_elements:>9}{cells}", flush=True)
    dist.destroy_process_group()


def _nothing(dist: Any) -> Any:
    class Nothing(dist.ProcessGroup):  # type: ignore[misc]
        """Takes every all-reduce for done."""

        def allreduce(self, tensors: Any, opts: Any = None) -> None:
            pass

        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

    return Nothing(0, 2)


def _median(comm: Any, call: Callable[[], Any], calls: int) -> float:
    comm.barrier()
    times = []
    for _ in range(calls + 20):
        before = perf_counter()
        call()
        times.append(perf_counter() - before)
    return statistics.median(times[20:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--elements", default="1,1024,4096,16384")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    env = {"HOSTRING_TRANSPORT": options.transport, "OMP_NUM_THREADS": "1"}
    return launch([os.path.abspath(__file__), *sys.argv[1:], "--worker"], options.ranks, env=env)


if __name__ == "__main__":
    sys.exit(main())
