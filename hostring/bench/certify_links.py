"""Runs the all-reduces of `hostring certify` on real links and compares their bits with a fold written in numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hostring.arrays.dtypes import unit_of
from hostring.arrays.fold import Expression, expression
from hostring.bench.truth import rounded
from hostring.comm import Comm
from hostring.group.config import Config
from hostring.group.contract import contract, neighbours
from hostring.group.group import connect
from hostring.store.stores import MemoryStore
from hostring.topologies.proof import NotCertified
from hostring.topologies.schedule import split_evenly
from hostring.tuning.agreement import open_session

Floats = npt.NDArray[np.float32]
GROUP_TIMEOUT_S = 60.0  # for one group of threads, start-up included


def contributions(world_size: int, n_elements: int) -> Floats:
    """A different row for each rank, of magnitudes whose sums depend on the order. Shape (world_size, n_elements)."""
    random = np.random.default_rng([world_size, n_elements])
    magnitudes = 10.0 ** random.uniform(-4, 4, (world_size, n_elements))
    return (random.standard_normal((world_size, n_elements)) * magnitudes).astype(np.float32)


def numpy_fold(rows: Floats, order: str, unit: int = 1) -> Floats:
    """The declared fold of `rows`, with numpy alone. It shares no code with schedules, on purpose.

    Args:
        rows: shape (world_size, n_elements).

    Returns:
        shape (n_elements,).
    """
    result = np.empty(rows.shape[1], np.float32)
    for chunk, (a, b) in enumerate(split_evenly(rows.shape[1], len(rows), unit)):
        result[a:b] = _evaluate(expression(order, [row[a:b] for row in rows], chunk + 1))
    return result


def _evaluate(node: Expression) -> Floats:
    if isinstance(node, tuple):
        total: Floats = _evaluate(node[0]) + _evaluate(node[1])
        return total
    leaf: Floats = node
    return leaf


def certify_on_links(
    topology: str, variant: str, order: str, world_size: int, sizes: Sequence[int], segment: int,
    transport: str = "tcp", wire: str = "float32",
) -> int:  # fmt: skip
    """Run one all-reduce variant on ranks that are threads, over loopback, and compare the bits on every rank.

    Args:
        sizes: numbers of elements, one all-reduce each.
        segment: elements of a pipelined piece.
        wire: see `hostring.init`.

    Returns:
        the number of results compared: one per rank and size.

    Raises:
        NotCertified: a rank got other bits, or failed; the message names it.
    """
    store = MemoryStore()

    def body(rank: int) -> None:
        with _join(rank, world_size, topology, order, transport, wire, store) as comm:
            comm.session.tuner.force(variant, segment)
            wrong = [fault for n_elements in sizes if (fault := _compare(comm, n_elements))]
            comm.barrier()  # no rank closes its links while another still folds
        if wrong:
            raise NotCertified(wrong[0])

    if faults := _in_threads(world_size, body):
        rank, fault = min(faults.items(), key=lambda item: (not isinstance(item[1], NotCertified), item[0]))
        what = str(fault) if isinstance(fault, NotCertified) else f"{type(fault).__name__}: {fault}"
        raise NotCertified(
            f"{topology}/{variant}, order {order}, {world_size} ranks over {transport}: rank {rank}: {what}"
        )
    return world_size * len(sizes)


def _in_threads(world_size: int, body: Callable[[int], None]) -> dict[int, Exception]:
    """Run `body(rank)` in a thread for each rank. Returns what failed, by rank."""
    faults: dict[int, Exception] = {}

    def run(rank: int) -> None:
        try:
            body(rank)
        except Exception as exc:
            faults[rank] = exc

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"hostring-certify-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(GROUP_TIMEOUT_S)
        if thread.is_alive():
            faults.setdefault(rank, TimeoutError(f"no result after {GROUP_TIMEOUT_S:.0f} s"))
    return faults


def _join(rank: int, world_size: int, topology: str, order: str, transport: str, wire: str, store: MemoryStore) -> Comm:
    config = Config(
        rank, world_size, topology=topology, order=order, transport=transport, timeout=GROUP_TIMEOUT_S / 2, store=store
    )
    group = connect(config, neighbours=neighbours(topology, order), contract=contract(topology, order, wire))
    return Comm(open_session(group, topology, order, wire, config.timeout))


def _compare(comm: Comm, n_elements: int) -> str:
    """One all-reduce. Returns what is wrong with the result, empty when nothing is."""
    rows = contributions(comm.world_size, n_elements)
    got: Floats = comm.all_reduce(rows[comm.rank].copy())
    want = numpy_fold(np.stack([rounded(row, comm.wire) for row in rows]), comm.order, unit_of(comm.wire))
    if comm.wire.endswith("-both"):
        want = rounded(want, comm.wire)
    wrong = np.flatnonzero(got.view(np.uint32) != want.view(np.uint32))
    if not wrong.size:
        return ""
    i = int(wrong[0])
    seen, declared = float(got[i]).hex(), float(want[i]).hex()
    return f"other bits in {wrong.size} of {n_elements} elements; element {i} is {seen}, declared is {declared}"
