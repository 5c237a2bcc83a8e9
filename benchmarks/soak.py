"""Random collectives under random deaths: `python benchmarks/soak.py --minutes 20`.

Ranks are processes. Each computes, from the same seeds, what every rank contributes, and compares every result with
numpy's, bit for bit. Now and then one is killed (SIGKILL) and started again; the survivors rebuild the group with it.
One rank is spared, so that its memory and its descriptors tell of all operations. The last line is the summary; the
exit code is 0 when nothing was wrong and nothing hung.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import mmap
import os
import random
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

import hostring
from hostring.store.server import StoreServer
from hostring.transports.tcp import listen_at

SPARED = 1
HANG_SECONDS = 150.0  # more than any wait that has an end
CALL_SECONDS = 30.0
POOL = 1 << 18
FIRST_SECONDS, START_SECONDS = 120.0, 15.0  # to start, when nothing may go wrong yet, and to be rebuilt
WARM = 2000  # operations after which a rank has what it needs: programs of 512 shapes are kept
FIELDS = ("operations", "wrong", "rebuilds", "epoch", "rss", "fds_warm", "fds", "beat")
_ROW = struct.Struct(f"<{len(FIELDS)}q")
_STOP = 0  # the first byte of the board


class Board:
    """What the ranks tell the parent: one row of numbers each, in shared memory."""

    def __init__(self, path: str, ranks: int) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 64 + ranks * _ROW.size)

    def read(self, rank: int) -> dict[str, int]:
        return dict(zip(FIELDS, _ROW.unpack_from(self._map, 64 + rank * _ROW.size), strict=True))

    def write(self, rank: int, row: dict[str, int]) -> None:
        _ROW.pack_into(self._map, 64 + rank * _ROW.size, *(row[name] for name in FIELDS))

    @property
    def stop(self) -> bool:
        return self._map[_STOP] != 0

    @stop.setter
    def stop(self, value: bool) -> None:
        self._map[_STOP] = int(value)


# ------------------------------------------------------------------ operations and what they must give

Array = np.ndarray[Any, Any]
DTYPES = ("float32", "float32", "float16", "float64", "int32", "int64", "uint8")
UFUNCS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum}


class Wrong(AssertionError):
    """A result that is not numpy's."""


@functools.cache
def pool(seed: int, rank: int, kind: str) -> Array:
    """Numbers that a rank's inputs are cut from: making new ones each time would take longer than to reduce them."""
    rng = np.random.default_rng([seed, rank, len(kind)])
    if kind == "integers":
        return rng.integers(0, 100, POOL)
    return rng.standard_normal(POOL) * 2.0 ** rng.integers(-6, 6, POOL)


class Case:
    """Operation `k` of the group of `epoch`: the same on every rank, with every rank's input."""

    def __init__(self, seed: int, epoch: int, k: int, world_size: int) -> None:
        self.rng = random.Random(f"{seed} {epoch} {k}")
        self.n, self._seed = world_size, seed
        self.size = int(2 ** self.rng.uniform(0, 17)) - 1 if self.rng.random() < 0.05 else self.rng.randrange(2000)
        self.dtype = np.dtype(self.rng.choice(DTYPES))
        self.root = self.rng.randrange(world_size)
        self._start = self.rng.randrange(POOL // 2)

    def input(self, rank: int, size: int | None = None) -> Array:
        numbers = pool(self._seed, rank, "integers" if self.dtype.kind in "iu" else "floats")
        return numbers[self._start : self._start + (self.size if size is None else size)].astype(self.dtype)

    def folded(self, op: str, size: int | None = None) -> Array:
        """((x0 + x1) + x2) + … in the wire's dtype, rounded once."""
        wire = np.dtype(np.float32) if self.dtype == np.float16 else self.dtype
        total = functools.reduce(UFUNCS[op], [self.input(r, size).astype(wire) for r in range(self.n)])
        if op == "avg":
            total = total / wire.type(self.n)
        with np.errstate(over="ignore"):
            return total.astype(self.dtype)

    def op(self) -> str:
        return self.rng.choice(["sum", "min", "max"] if self.dtype.kind in "iu" else ["sum", "avg", "min", "max"])


def same(got: Any, expected: Array, what: str) -> None:
    if np.asarray(got).tobytes() != expected.tobytes():
        raise Wrong(what)


def all_reduce(comm: hostring.Comm, case: Case) -> None:
    op = case.op()
    same(comm.all_reduce(case.input(comm.rank), op), case.folded(op), f"all_reduce {op}")


def several(comm: hostring.Comm, case: Case) -> None:
    op = case.op()
    works = [comm.all_reduce(case.input(comm.rank, 10 * k + 1), op, async_op=True) for k in range(6)]
    for k, work in enumerate(works):
        same(work.wait(), case.folded(op, 10 * k + 1), f"asynchronous all_reduce {op}")


def reduce(comm: hostring.Comm, case: Case) -> None:
    op, mine = case.op(), case.input(comm.rank)
    same(
        comm.reduce(mine, case.root, op),
        case.folded(op) if comm.rank == case.root else case.input(comm.rank),
        f"reduce {op}",
    )


def reduce_scatter(comm: hostring.Comm, case: Case) -> None:
    op, rows = case.op(), case.size // case.n
    expected = case.folded(op, rows * case.n)[rows * comm.rank : rows * (comm.rank + 1)]
    same(comm.reduce_scatter(case.input(comm.rank, rows * case.n), op), expected, f"reduce_scatter {op}")


def broadcast(comm: hostring.Comm, case: Case) -> None:
    same(comm.broadcast(case.input(comm.rank), case.root), case.input(case.root), "broadcast")


def all_gather(comm: hostring.Comm, case: Case) -> None:
    expected = np.stack([case.input(r) for r in range(case.n)])
    same(comm.all_gather(case.input(comm.rank)), expected, "all_gather")


def uneven_gather(comm: hostring.Comm, case: Case) -> None:
    counts = [case.rng.randrange(500) for _ in range(case.n)]
    expected = np.concatenate([case.input(r, counts[r]) for r in range(case.n)])
    same(comm.all_gather(case.input(comm.rank, counts[comm.rank]), counts=counts), expected, "uneven all_gather")


def scatter(comm: hostring.Comm, case: Case) -> None:
    whole = case.input(case.root, case.n * 7).reshape(case.n, 7)
    out = np.empty(7, case.dtype)
    same(comm.scatter(whole if comm.rank == case.root else None, case.root, out=out), whole[comm.rank], "scatter")


def all_to_all(comm: hostring.Comm, case: Case) -> None:
    parts = [case.input(r, case.n * 5).reshape(case.n, 5) for r in range(case.n)]
    same(comm.all_to_all(parts[comm.rank]), np.stack([p[comm.rank] for p in parts]), "all_to_all")


def decide(comm: hostring.Comm, case: Case) -> None:
    got = comm.decide(case.input(comm.rank, 9), lambda stacked: stacked[::-1][0], case.root)
    same(got, case.input(case.n - 1, 9), "decide")


def round_trip(comm: hostring.Comm, case: Case) -> None:
    right, left = (comm.rank + 1) % case.n, (comm.rank - 1) % case.n
    if case.n == 1:
        return
    work = comm.recv(np.empty(case.size, case.dtype), left, tag=7, async_op=True)
    comm.send(case.input(comm.rank), right, tag=7)
    same(work.wait(), case.input(left), "send and recv")


def split(comm: hostring.Comm, case: Case) -> None:
    part = comm.split(comm.rank % 2)
    assert part is not None
    with part:
        members = [r for r in range(case.n) if r % 2 == comm.rank % 2]
        same(part.all_gather(case.input(comm.rank, 3)), np.stack([case.input(r, 3) for r in members]), "split")


OPERATIONS: Sequence[tuple[Callable[[hostring.Comm, Case], None], float]] = [
    (all_reduce, 8),
    (several, 1),
    (reduce, 1),
    (reduce_scatter, 1),
    (broadcast, 2),
    (all_gather, 2),
    (uneven_gather, 1),
    (scatter, 1),
    (all_to_all, 1),
    (decide, 2),
    (round_trip, 1),
    (lambda comm, case: comm.barrier(), 1),
    (split, 0.05),
]
CALLS, WEIGHTS = [call for call, _ in OPERATIONS], [weight for _, weight in OPERATIONS]


# ------------------------------------------------------------------ one rank


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


# ------------------------------------------------------------------ the parent


class Soak:
    """Starts, kills and watches the ranks."""

    def __init__(self, ranks: int, seed: int, folder: str, log: Any) -> None:
        self.ranks, self.seed, self.log = ranks, seed, log
        self.board_path = os.path.join(folder, "board")
        with open(self.board_path, "wb") as file:
            file.write(bytes(64 + ranks * _ROW.size))
        self.board = Board(self.board_path, ranks)
        self.secret = secrets.token_hex(16)
        self.server = StoreServer([listen_at("127.0.0.1", 0)], self.secret.encode())
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.kills = self.rejoins = self.restarts = self.wrong = self.hangs = 0
        self.before = [0] * ranks  # operations of a rank's earlier lives
        self.memory: list[int] = []  # of the spared rank, once it was warm
        for rank in range(ranks):
            self.start(rank, False)

    def start(self, rank: int, again: bool) -> None:
        row = self.board.read(rank)
        self.before[rank] += row["operations"]
        self.wrong += row["wrong"]
        self.board.write(rank, dict.fromkeys(FIELDS, 0))
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "HOSTRING_STORE": f"127.0.0.1:{self.server.port}",
            "HOSTRING_SECRET": self.secret,
            "HOSTRING_REJOIN": str(int(again)),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            __file__,
            "--worker",
            self.board_path,
            "--ranks",
            str(self.ranks),
            "--seed",
            str(self.seed),
        ]
        self.processes[rank] = subprocess.Popen(command, env=environment, stderr=self.log)

    def run(self, seconds: float, pause: float) -> None:
        rng = random.Random(self.seed)
        self.until_all_work()
        end = time.monotonic() + seconds
        beats, seen = self.beats(), time.monotonic()
        next_kill = time.monotonic() + pause
        healthy_since: list[int] = self.beats()
        while time.monotonic() < end and not self.hangs and not self.wrong:
            time.sleep(0.05)
            now = self.beats()
            if now != beats:
                beats, seen = now, time.monotonic()
            elif time.monotonic() - seen > HANG_SECONDS:
                self.hung()
                break
            self.revive()
            spared = self.board.read(SPARED)
            if spared["operations"] > WARM:
                self.memory.append(spared["rss"])
            whole = all(b > a for a, b in zip(healthy_since, now, strict=True))
            if time.monotonic() > next_kill and (whole or (self.kills and rng.random() < 0.002)):
                victim = rng.choice([r for r in range(self.ranks) if r != SPARED])
                self.processes[victim].kill()
                self.processes[victim].wait()
                self.kills += 1
                time.sleep(rng.choice((0.0, 0.0, 0.3)))
                self.start(victim, True)
                self.rejoins += 1
                healthy_since = self.beats()
                next_kill = time.monotonic() + rng.expovariate(1 / pause)
        self.finish()

    def until_all_work(self) -> None:
        """The minutes count from here on."""
        give_up = time.monotonic() + HANG_SECONDS
        while (
            not all(self.beats())
            and time.monotonic() < give_up
            and all(p.poll() is None for p in self.processes.values())
        ):
            time.sleep(0.05)
        if not all(self.beats()):
            self.hung()

    def beats(self) -> list[int]:
        return [self.board.read(r)["beat"] for r in range(self.ranks)]

    def revive(self) -> None:
        """A rank that came back into a group which then died again gives up; whoever runs it starts it once more."""
        for rank, process in self.processes.items():
            if process.poll() is not None:
                self.wrong += self.board.read(rank)["wrong"]
                self.restarts += 1
                self.start(rank, True)

    def hung(self) -> None:
        self.hangs += 1
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)

    def finish(self) -> None:
        self.board.stop = True
        give_up = time.monotonic() + HANG_SECONDS
        while not self.hangs and any(p.poll() is None for p in self.processes.values()):
            time.sleep(0.05)
            if time.monotonic() > give_up:
                self.hung()
            for rank, process in self.processes.items():
                if process.poll():  # it gave up while the others rebuild, and they wait for it
                    self.restarts += 1
                    self.start(rank, True)
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.server.close()

    def summary(self, seconds: float) -> str:
        rows = [self.board.read(r) for r in range(self.ranks)]
        wrong = self.wrong + sum(row["wrong"] for row in rows)
        operations = [row["operations"] + old for row, old in zip(rows, self.before, strict=True)]
        spared = rows[SPARED]
        quarter = len(self.memory) // 4
        growth = (max(self.memory[3 * quarter :]) - max(self.memory[quarter : 2 * quarter])) / 1e6 if quarter else 0.0
        return (
            f"soak: {seconds:.0f} s, ranks={self.ranks} ops={operations[SPARED]} results={sum(operations)} "
            f"kills={self.kills} rejoins={self.rejoins} rebuilds={spared['rebuilds']} restarts={self.restarts} "
            f"wrong={wrong} hangs={self.hangs} "
            f"rss_growth={growth:.1f} MB (last quarter over second) rss={spared['rss'] / 1e6:.0f} MB "
            f"fds={spared['fds_warm']}->{spared['fds']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between deaths")
    parser.add_argument("--log", help="file for what the ranks say")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.ranks, args.seed)
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hr-soak-") as folder, open(args.log or os.devnull, "wb") as log:
        soak = Soak(args.ranks, args.seed, folder, log)
        soak.run(args.minutes * 60, args.pause)
        print(soak.summary(time.monotonic() - started), flush=True)
    return int(bool(soak.wrong or soak.hangs))


if __name__ == "__main__":
    sys.exit(main())
