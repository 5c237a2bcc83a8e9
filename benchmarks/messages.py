#!/usr/bin/env python3
"""A message to the other rank and back through torch's send and recv, over gloo and over hostring, in turns.

python benchmarks/messages.py                         # two ranks
python benchmarks/messages.py --busy 4                # beside four processes that compute
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import warnings
from time import perf_counter
from typing import Any

from hostring.launch.ranks import launch


def work(options: argparse.Namespace) -> None:
    """A rank."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.zeros(options.elements)
    groups = {"gloo": dist.group.WORLD, "hostring": dist.new_group(backend="hostring")}

    def one_way(group: Any) -> float:
        seconds = []
        dist.barrier()
        for _ in range(options.messages):
            begun = perf_counter()
            for sends in (rank == 0, rank == 1):
                dist.send(x, 1 - rank, group=group) if sends else dist.recv(x, 1 - rank, group=group)
            seconds.append(perf_counter() - begun)
        return statistics.median(seconds) / 2

    for group in groups.values():
        one_way(group)  # links, and code
    spin = [sys.executable, "-c", "while True: pass"]
    beside = [subprocess.Popen(spin) for _ in range(options.busy)] if rank == 0 else []
    try:
        rounds = [[one_way(group) for group in groups.values()] for _ in range(options.rounds)]
    finally:
        for process in beside:
            process.kill()
            process.wait()
    if rank == 0:
        for name, column in zip(groups, zip(*rounds, strict=True), strict=True):
            print(f"{name:>9}: {statistics.median(column) * 1e3:.3f} ms one way, median of {options.rounds} rounds")
        print(f"hostring takes {statistics.median(ours / theirs for theirs, ours in rounds):.2f} times gloo's time")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--elements", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--messages", type=int, default=60)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    return launch([os.path.abspath(__file__), *sys.argv[1:], "--worker"], 2, env={"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    sys.exit(main())
