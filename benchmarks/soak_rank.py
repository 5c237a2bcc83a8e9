"""One rank of the soak: it operates until the board says stop, and rebuilds its group after each death."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
from itertools import count

import numpy as np
from soak_board import FIELDS, Board
from soak_operations import CALLS, WEIGHTS, Case, Wrong

import hostring

CALL_SECONDS = 30.0
FIRST_SECONDS, START_SECONDS = 120.0, 15.0  # to start, when nothing may go wrong yet, and to be rebuilt
WARM = 2000  # operations after which a rank has what it needs: programs of 512 shapes are kept


def rss() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def work(board_path: str, ranks: int, seed: int) -> None:
    """Until the board says stop: operate, and after each death rebuild."""
    faulthandler.register(signal.SIGUSR1)
    me = int(os.environ["RANK"])
    board = Board(board_path, ranks)
    row = dict.fromkeys(FIELDS, 0)
    comm = hostring.init(timeout=START_SECONDS if os.environ["HOSTRING_REJOIN"] == "1" else FIRST_SECONDS)
    while True:
        try:
            row["epoch"] = int(comm.all_reduce(np.array([row["epoch"] + 1]), "max", timeout=CALL_SECONDS)[0])
            for k in count():
                if k % 25 == 0:
                    note(board, comm.rank, row)
                    if comm.all_reduce(np.array([int(board.stop)]), "max", timeout=CALL_SECONDS)[0]:
                        comm.close()
                        return
                case = Case(seed, row["epoch"], k, comm.world_size)
                case.rng.choices(CALLS, WEIGHTS)[0](comm, case)
                row["operations"] += 1
        except Wrong as exc:
            row["wrong"] += 1
            note(board, me, row)
            print(f"rank {comm.rank}, epoch {row['epoch']}, operation {k}: {exc} is wrong", file=sys.stderr, flush=True)
            raise
        except hostring.HostringError as exc:
            print(f"rank {comm.rank}: {exc}", file=sys.stderr, flush=True)
            comm = rebuilt(comm, ranks)
            row["rebuilds"] += 1


def rebuilt(comm: hostring.Comm, ranks: int) -> hostring.Comm:
    """Again and again: a rank may die while the group is rebuilt, too."""
    while True:
        try:
            return comm.rebuild(min_ranks=ranks, timeout=START_SECONDS)
        except hostring.RendezvousError as exc:
            print(f"rank {comm.rank}: not rebuilt: {exc}", file=sys.stderr, flush=True)


def note(board: Board, rank: int, row: dict[str, int]) -> None:
    row["beat"] += 1
    row["rss"] = rss()
    row["fds"] = len(os.listdir("/proc/self/fd"))
    if row["operations"] < WARM:
        row["fds_warm"] = row["fds"]
    board.write(rank, row)
