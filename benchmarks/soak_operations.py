"""Random operations, and what they must give: computed from the same seeds on every rank, with numpy alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import hostring

POOL = 1 << 18  # numbers of each rank and kind

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
