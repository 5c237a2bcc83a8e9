"""Whatever happens to one rank: the others end within their deadline, all name that rank, and nothing is left behind.

The matrix is {kill, stop, close, blackhole, reset, truncated, junk, oversized, fragments, slow} x {rendezvous, hello,
idle, first half, second half of a collective} x {mesh, ring, star, tree} x {3, 4 ranks}. One test is one fault in one
phase. Its eight groups run side by side, because most of them wait for a deadline. Ranks are threads with real TCP
links, or processes where the fault happens to a process. Fragments and slow reads look like a slow network, so these
must simply succeed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import faulty_start
import pytest
from cut_networks import can_cut, network
from fault_groups import (
    SECRET,
    Cell,
    Outcome,
    run_processes,
    run_threads,
    slowness,
    what_is_new,
    what_is_there,
)
from faulty import BY_PROCESS, FATAL, HARMLESS, TOPOLOGIES

from hostring.store.server import StoreServer
from hostring.transports.tcp import listen_at

pytestmark = pytest.mark.faults

PHASES = ("rendezvous", "hello", "idle", "first", "second")
DETECTED = {"kill": "PeerLostError", "close": "PeerLostError", "reset": "PeerLostError", "truncated": "PeerLostError"}
STALLED = {
    "stop": "OperationTimeout",
    "blackhole": "OperationTimeout",
    "junk": "ProtocolError",
    "oversized": "CollectiveMismatch",
}


KINDS = {**DETECTED, **STALLED, "dead host": "PeerLostError"}


def judge(cell: Cell, outcomes: list[Outcome]) -> list[str]:
    """What is wrong with the end of one group."""
    wrong = []
    for rank, o in enumerate(outcomes):
        if cell.fault in HARMLESS:
            fine = not o.error and o.good == 3 and not o.left
        elif rank == cell.culprit:
            fine = o.error not in ("hangs", "") and not o.left
        else:
            kind = KINDS[cell.fault] if cell.starts else "RendezvousError"
            fine = o.error == kind and o.named == cell.culprit and o.seconds < cell.limit and not o.left
            fine = fine and (o.again == kind if cell.starts else True)
        if not fine:
            wrong.append(f"{cell.topology} x {cell.world_size}, rank {rank} (culprit {cell.culprit}): {o}")
    return wrong


@pytest.fixture(scope="module", autouse=True)
def spoiled() -> Iterator[None]:
    multiprocessing.util.get_temp_dir()  # now, and not in a test's own folder
    StoreServer([listen_at("127.0.0.1", 0)], SECRET).close()  # libuv opens a pipe for its signals once in a process
    with faulty_start.hellos_spoiled():
        yield


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.ForkServerContext:
    """Forks ranks off a process that has imported everything: 28 at once must not cost 28 times the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "fault_groups"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", [*FATAL, *HARMLESS])
def test_matrix(fault: str, phase: str, request: pytest.FixtureRequest) -> None:
    slow = slowness()
    cells = [Cell(fault, phase, topology, n, slow) for topology in TOPOLOGIES for n in (3, 4)]
    with contextlib.ExitStack() as stack:
        networks: list[str | None] = [None] * len(cells)
        if fault == "blackhole":
            if why := can_cut():
                pytest.skip(why)
            networks = [stack.enter_context(network()) for _ in cells]
        before = what_is_there()
        outcomes = (
            run_processes(cells, networks, request.getfixturevalue("processes"))
            if fault in BY_PROCESS
            else run_threads(cells)
        )
    wrong = [text for cell in cells for text in judge(cell, outcomes[cell])]
    assert not wrong, "\n".join(wrong)
    if fault not in BY_PROCESS:
        assert what_is_new(before) == ""


@pytest.mark.usefixtures("own_folder")
def test_a_dead_host_is_noticed_long_before_the_deadline(processes: Any) -> None:
    """Nothing comes from there, not even from its kernel: no deadline has to pass for that."""
    if why := can_cut():
        pytest.skip(why)
    cells = [Cell("dead host", "first", topology, 3, slowness()) for topology in TOPOLOGIES]
    with contextlib.ExitStack() as stack:
        outcomes = run_processes(cells, [stack.enter_context(network()) for _ in cells], processes)
    wrong = [text for cell in cells for text in judge(cell, outcomes[cell])]
    assert not wrong, "\n".join(wrong)
