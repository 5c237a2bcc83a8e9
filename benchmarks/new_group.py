#!/usr/bin/env python3
"""How long torch's `new_group` takes: groups over gloo and over hostring, made in turns by the same processes.

    python benchmarks/new_group.py                        # two ranks, 20 groups a round
    python benchmarks/new_group.py --ranks 3 --used       # and one all_reduce on each new group

Beside seconds, which depend on what else the machine does, it counts what a group costs in any case: threads that were
started, and descriptors that stay open.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import threading
import warnings
from time import perf_counter, process_time

from hostring.launch.ranks import launch

BACKENDS = ("gloo", "hostring")


def work(options: argparse.Namespace) -> None:
    """A rank."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    started = _count_threads()
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    cpu: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    counts = {}
    for turn in range(options.rounds + 1):  # the first one loads code
        for backend in BACKENDS:
            dist.barrier()
            gc.collect()  # what is left of the groups before
            threads, descriptors = started[0], len(os.listdir("/proc/self/fd"))
            before, burnt = perf_counter(), process_time()
            groups = [dist.new_group(backend=backend) for _ in range(options.groups)]
            if options.used:
                for group in groups:
                    dist.all_reduce(torch.ones(4), group=group)
            if turn:
                seconds[backend].append(perf_counter() - before)
                cpu[backend].append(process_time() - burnt)
            opened = len(os.listdir("/proc/self/fd")) - descriptors
            counts[backend] = (started[0] - threads) / options.groups, opened / options.groups
            dist.barrier()
            for group in groups:
                dist.destroy_process_group(group)
            del group, groups  # what gloo leaves takes 0.3 s to end, which is not to count for the next backend
    if rank == 0:
        _show(options.groups, seconds, cpu, counts)
    dist.barrier()
    dist.destroy_process_group()


def _show(
    n_groups: int, seconds: dict[str, list[float]], cpu: dict[str, list[float]], counts: dict[str, tuple[float, float]]
) -> None:
    for backend in BACKENDS:
        middle, burnt = statistics.median(seconds[backend]), statistics.median(cpu[backend])
        print(
            f"{backend:>9}: median {middle:.3f} s for {n_groups} groups, CPU {burnt:.3f} s on rank 0; "
            f"a group: {counts[backend][0]:.2f} Python threads, {counts[backend][1]:.1f} descriptors"
        )
    ratios = sorted(ours / theirs for theirs, ours in zip(seconds["gloo"], seconds["hostring"], strict=True))
    print(f"hostring takes {statistics.median(ratios):.2f} times gloo's time ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def _count_threads() -> list[int]:
    """Counts the threads that Python starts from now on."""
    started = [0]
    start = threading.Thread.start

    def counting(self: threading.Thread) -> None:
        started[0] += 1
        start(self)

    threading.Thread.start = counting  # type: ignore[method-assign]
    return started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--used", action="store_true", help="call one all_reduce on each new group, too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    env = {"HOSTRING_TRANSPORT": options.transport, "OMP_NUM_THREADS": "1"}
    return launch([os.path.abspath(__file__), *sys.argv[1:], "--worker"], options.ranks, env=env)


if __name__ == "__main__":
    sys.exit(main())
