"""Groups of which one rank has a fault: as threads, or as processes where the fault happens to a process."""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

import faulty
import faulty_start
import numpy as np
from cut_networks import cut, enter, listening_in
from faulty import CULPRITS, FATAL, HARMLESS, VARIANTS, Fault, Vanished
from oracle import bits, fold_in_order, force, rank_distinct

from hostring.comm import Comm
from hostring.errors import HostringError
from hostring.rendezvous import TcpStore
from hostring.store.server import StoreServer
from hostring.transports import tcp
from hostring.transports.tcp import listen_at

N_ELEMENTS = 3000
SEGMENT = 250
SECRET = b"of the matrix"
CALM_SECONDS = 40.0  # for what must succeed
START_SECONDS = 2.5  # for groups that can't start
CALL_SECONDS = 1.0  # for a call that can't end
HOST_SECONDS = 2.0  # after which a host counts as dead
SLACK = 1.0
MAX_SLOWNESS = 5.0
EVERYTHING = 90.0  # for one test


def slowness() -> float:
    """How much longer than alone things take on this machine now, roughly: by the load that others put on its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_SLOWNESS, max(1.0, os.getloadavg()[0] / (2 * cores)))


@dataclass(frozen=True)
class Cell:
    """One group and what happens to it."""

    fault: str
    phase: str
    topology: str
    world_size: int
    slowness: float = 1.0

    @property
    def culprit(self) -> int:
        return CULPRITS[self.world_size][self.topology]

    @property
    def seconds(self) -> float:
        """For a call that can't end."""
        return 60.0 if self.fault == "dead host" else CALL_SECONDS * self.slowness

    @property
    def start_seconds(self) -> float:
        """For a group that can't start."""
        return START_SECONDS * self.slowness

    @property
    def limit(self) -> float:
        """Seconds after which whoever is not the culprit must have noticed."""
        if self.fault == "dead host":
            return 5 * HOST_SECONDS * self.slowness
        return (self.seconds if self.starts else self.start_seconds) + SLACK * self.slowness

    @property
    def starts(self) -> bool:
        return self.phase not in ("rendezvous", "hello") or self.fault in HARMLESS


@dataclass
class Outcome:
    """How one rank ended."""

    error: str = ""  # type, or empty
    message: str = ""
    named: int | None = None
    seconds: float = 0.0  # from the start of the call that raised
    again: str = ""  # the type that the next call raised
    good: int = 0  # calls with the right bits
    left: str = ""  # threads, descriptors, files that it left


def inputs(cell: Cell) -> list[np.ndarray]:
    n_elements = N_ELEMENTS // 10 if cell.fault == "fragments" else N_ELEMENTS  # each byte is a system call
    return rank_distinct(cell.world_size, n_elements, np.float32, seed=5)


def take_part(
    cell: Cell, rank: int, store: Any, fault: Fault, until: threading.Event, hosts: str | None = None
) -> Outcome:
    """One rank of a group. Raises Vanished where a process would end."""
    outcome = Outcome()
    mine = fault if rank == cell.culprit else Fault("none")
    started = time.perf_counter()
    comm: Comm | None = None
    try:
        if rank == cell.culprit and cell.phase == "rendezvous":
            faulty_start.misbehave_at_store(store, fault, until)
        timeout = CALM_SECONDS if cell.starts else cell.start_seconds
        with faulty_start.bad_hello(mine if cell.phase == "hello" else Fault("none")):
            comm = faulty.join(rank, cell.world_size, cell.topology, timeout, store, mine, hosts)
        force(comm, VARIANTS[cell.topology], SEGMENT)
        x = inputs(cell)
        expected = bits(fold_in_order(comm.order, x))
        calls = 3 if cell.fault in HARMLESS else 6
        for k in range(calls):
            started = time.perf_counter()
            if rank == cell.culprit and k == 1 and cell.starts:
                arm_fault(cell, comm, fault)
            calm = k == 0 or cell.fault in HARMLESS
            got = comm.all_reduce(x[rank].copy(), timeout=CALM_SECONDS if calm else cell.seconds)
            assert bits(got) == expected, f"{cell}, rank {rank}: wrong bits in call {k}"
            outcome.good += 1
    except HostringError as exc:
        outcome.seconds = time.perf_counter() - started
        outcome.error, outcome.message, outcome.named = type(exc).__name__, str(exc), exc.rank
        if comm is not None:
            outcome.again = failure_of_the_next_call(comm, cell)
    finally:
        if comm is not None:
            comm.close()
    return outcome


def failure_of_the_next_call(comm: Comm, cell: Cell) -> str:
    """The type of its error, when that comes soon."""
    started = time.perf_counter()
    try:
        comm.barrier(timeout=CALM_SECONDS)
    except HostringError as exc:
        return type(exc).__name__ if time.perf_counter() - started < SLACK * cell.slowness else "late"
    return ""


def arm_fault(cell: Cell, comm: Comm, fault: Fault) -> None:
    """After one good call, of which the traffic is known."""
    traffic = comm.counters.snapshot()
    messages = sum(link["messages_sent"] + link["messages_received"] for link in traffic["links"].values())
    total = traffic["payload_sent"] + traffic["payload_received"] + 64 * messages
    if cell.phase in ("first", "second"):
        fault.moved, fault.at = 0, int(total * (0.25 if cell.phase == "first" else 0.75))
    elif cell.phase == "idle" and fault.name in ("truncated", "junk", "oversized"):
        fault.moved = fault.at = 0
    elif cell.phase == "idle" and fault.name in FATAL:
        fault.strike()


def run_threads(cells: list[Cell]) -> dict[Cell, list[Outcome]]:
    """All groups at once. Nothing hangs: threads that don't end are reported."""
    outcomes = {cell: [Outcome() for _ in range(cell.world_size)] for cell in cells}
    until = threading.Event()
    servers: list[StoreServer] = []
    threads: dict[threading.Thread, tuple[Cell, int]] = {}

    def body(cell: Cell, rank: int, port: int, fault: Fault) -> None:
        store = TcpStore.at("127.0.0.1", port, secret=SECRET, deadline=time.monotonic() + CALM_SECONDS)
        try:
            outcomes[cell][rank] = take_part(cell, rank, store, fault, until)
        except Vanished:
            outcomes[cell][rank].error = "Vanished"
        except BaseException as exc:
            outcomes[cell][rank].error = f"{type(exc).__name__}: {exc}"
        finally:
            store.close()

    for cell in cells:
        servers.append(StoreServer([listen_at("127.0.0.1", 0)], SECRET))
        fault = Fault(cell.fault)
        for rank in range(cell.world_size):
            thread = threading.Thread(target=body, args=(cell, rank, servers[-1].port, fault), daemon=True)
            threads[thread] = cell, rank
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + EVERYTHING
    for thread, (cell, rank) in threads.items():
        if rank != cell.culprit:
            thread.join(max(0.0, deadline - time.monotonic()))
    until.set()
    for thread, (cell, rank) in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            outcomes[cell][rank].error = "hangs"
    for server in servers:
        server.close()
    return outcomes


def process_body(cell: Cell, rank: int, port: int, pipe: Any, network: str | None, folder: str | None) -> None:
    """In the child."""
    tempfile.tempdir = folder
    if cell.fault == "dead host":
        tcp.HOST_ANSWER_S = HOST_SECONDS
    before = what_is_there()
    fault = Fault(cell.fault)
    host = "127.0.0.1"
    if network is not None:
        enter(network, culprit=rank == cell.culprit)
        host = "198.18.0.1"
        fault.blackhole = lambda: cut(network)
    store = TcpStore.at(host, port, secret=SECRET, deadline=time.monotonic() + CALM_SECONDS)
    with faulty_start.hellos_spoiled():
        try:
            outcome = take_part(cell, rank, store, fault, threading.Event(), None if network is None else "net0")
        except BaseException as exc:
            outcome = Outcome(f"{type(exc).__name__}: {exc}")
    store.close()
    outcome.left = what_is_new(before)
    pipe.send(outcome)
    pipe.close()


def run_processes(cells: list[Cell], networks: list[str | None], context: Any) -> dict[Cell, list[Outcome]]:
    """All groups at once. The stopped ranks are ended in the end."""
    outcomes = {cell: [Outcome("hangs") for _ in range(cell.world_size)] for cell in cells}
    servers: list[StoreServer] = []
    children: list[tuple[Cell, int, Any, Any]] = []
    for cell, network in zip(cells, networks, strict=True):
        sock = listen_at("127.0.0.1", 0) if network is None else listening_in(network)
        servers.append(StoreServer([sock], SECRET))
        for rank in range(cell.world_size):
            ours, theirs = context.Pipe(duplex=False)
            what = cell, rank, servers[-1].port, theirs, network, tempfile.tempdir
            child = context.Process(target=process_body, args=what, daemon=True)
            child.start()
            theirs.close()
            children.append((cell, rank, child, ours))
    deadline = time.monotonic() + EVERYTHING
    for cell, rank, _, pipe in children:
        if rank != cell.culprit and pipe.poll(max(0.0, deadline - time.monotonic())):
            try:
                outcomes[cell][rank] = pipe.recv()
            except EOFError:
                outcomes[cell][rank] = Outcome("died")
    for cell, rank, child, pipe in children:
        if rank != cell.culprit or cell.fault == "kill":
            child.join(max(0.0, deadline - time.monotonic()))
        if rank == cell.culprit:
            outcomes[cell][rank] = Outcome(
                "killed" if child.exitcode == -signal.SIGKILL else "runs" if child.is_alive() else "ended"
            )
        elif child.exitcode != 0:
            outcomes[cell][rank].left += f" exit code {child.exitcode}"
        child.kill()
        child.join(10)
        child.close()
        pipe.close()
    for server in servers:
        server.close()
    return outcomes


def what_is_there() -> set[str]:
    """Threads, descriptors, socket files and shared memory of this process."""
    threads = {f"thread {t.name}" for t in threading.enumerate()}
    descriptors = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors.add(f"descriptor {fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    files = {f"file {path}" for path in glob.glob(os.path.join(tempfile.gettempdir(), "*"))}
    return threads | descriptors | files


def what_is_new(before: set[str]) -> str:
    """What was not there `before`, once things have settled."""
    for _ in range(40):
        gc.collect()
        if not (new := what_is_there() - before):
            return ""
        time.sleep(0.05)
    return ", ".join(sorted(new))
