"""Whatever happens to one rank: the others end within their deadline, all name that rank, and nothing is left behind.

The matrix is {kill, stop, close, blackhole, reset, truncated, junk, oversized, fragments, slow} x {rendezvous, hello, idle,
first half, second half of a collective} x {mesh, ring, star, tree} x {3, 4 ranks}. One test is one fault in one phase; its
eight groups run side by side, since most of them wait for a deadline. Ranks are threads with real TCP links, or processes
where the fault happens to a process. What can't be told from slowness (fragments, slow) must simply succeed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import faulty
import numpy as np
import pytest
from faulty import BY_PROCESS, CULPRITS, FATAL, HARMLESS, TOPOLOGIES, VARIANTS, Fault, Vanished
from oracle import bits, fold_in_order, force, rank_distinct

from hostring.comm import Comm
from hostring.errors import HostringError
from hostring.group.rendezvous import TcpStore
from hostring.store.server import StoreServer
from hostring.transports import tcp
from hostring.transports.addresses import listen

PHASES = ("rendezvous", "hello", "idle", "first", "second")
N_ELEMENTS = 3000
SEGMENT = 250
SECRET = b"of the matrix"
START_SECONDS = 2.5  # for groups that can't start
CALL_SECONDS = 1.0  # for a call that can't end
HOST_SECONDS = 2.0  # after which a host counts as dead
SLACK = 1.0
EVERYTHING = 45.0  # for one test


@dataclass(frozen=True)
class Cell:
    """One group and what happens to it."""

    fault: str
    phase: str
    topology: str
    world_size: int

    @property
    def culprit(self) -> int:
        return CULPRITS[self.world_size][self.topology]

    @property
    def seconds(self) -> float:
        """For a call that can't end."""
        return 60.0 if self.fault == "dead host" else CALL_SECONDS

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
            faulty.misbehave_at_store(store, fault, until)
        timeout = 20.0 if cell.starts else START_SECONDS
        with faulty.bad_hello(mine if cell.phase == "hello" else Fault("none")):
            comm = faulty.join(rank, cell.world_size, cell.topology, timeout, store, mine, hosts)
        force(comm, VARIANTS[cell.topology], SEGMENT)
        x = inputs(cell)
        expected = bits(fold_in_order(comm.order, x))
        calls = 3 if cell.fault in HARMLESS else 6
        for k in range(calls):
            started = time.perf_counter()
            if rank == cell.culprit and k == 1 and cell.starts:
                arm_fault(cell, comm, fault)
            got = comm.all_reduce(x[rank].copy(), timeout=20.0 if k == 0 or cell.fault in HARMLESS else cell.seconds)
            assert bits(got) == expected, f"{cell}, rank {rank}: wrong bits in call {k}"
            outcome.good += 1
    except HostringError as exc:
        outcome.seconds = time.perf_counter() - started
        outcome.error, outcome.message, outcome.named = type(exc).__name__, str(exc), exc.rank
        if comm is not None:
            started = time.perf_counter()
            try:
                comm.barrier(timeout=20.0)
            except HostringError as again:
                outcome.again = type(again).__name__ if time.perf_counter() - started < SLACK else "late"
    finally:
        if comm is not None:
            comm.close()
    return outcome


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


# ------------------------------------------------------------------ ranks as threads


def run_threads(cells: list[Cell]) -> dict[Cell, list[Outcome]]:
    """All groups at once. Nothing hangs: threads that don't end are reported."""
    outcomes = {cell: [Outcome() for _ in range(cell.world_size)] for cell in cells}
    until = threading.Event()
    servers: list[StoreServer] = []
    threads: dict[threading.Thread, tuple[Cell, int]] = {}

    def body(cell: Cell, rank: int, port: int, fault: Fault) -> None:
        store = TcpStore.at("127.0.0.1", port, secret=SECRET, deadline=time.monotonic() + 20)
        try:
            outcomes[cell][rank] = take_part(cell, rank, store, fault, until)
        except Vanished:
            outcomes[cell][rank].error = "Vanished"
        except BaseException as exc:
            outcomes[cell][rank].error = f"{type(exc).__name__}: {exc}"
        finally:
            store.close()

    for cell in cells:
        servers.append(StoreServer([listen("127.0.0.1", 0)], SECRET))
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


# ------------------------------------------------------------------ ranks as processes


def process_body(cell: Cell, rank: int, port: int, pipe: Any, network: str | None, folder: str | None) -> None:
    """In the child."""
    tempfile.tempdir = folder
    tcp.HOST_SECONDS = HOST_SECONDS
    before = what_is_there()
    fault = Fault(cell.fault)
    host = "127.0.0.1"
    if network is not None:
        enter(network, culprit=rank == cell.culprit)
        host = "198.18.0.1"
        fault.blackhole = lambda: cut(network)
    store = TcpStore.at(host, port, secret=SECRET, deadline=time.monotonic() + 20)
    with faulty.hellos_spoiled():
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
        sock = listen("127.0.0.1", 0) if network is None else listening_in(network)
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


# ------------------------------------------------------------------ networks that can be cut


def ip(*args: str, batch: str | None = None) -> None:
    subprocess.run(["ip", *args], input=batch, check=True, capture_output=True, text=True, timeout=20)


def can_cut() -> str:
    """Why this machine can't have networks of its own; empty when it can."""
    try:
        with network():
            return ""
    except (OSError, subprocess.SubprocessError) as exc:
        return f"network namespaces need root and iproute2: {exc}"


@contextlib.contextmanager
def network() -> Iterator[str]:
    """Two network namespaces, NAME-a with 198.18.0.1 (a range for tests, RFC 2544) and NAME-b with 198.18.0.2, and a cable."""
    name = f"hrtest-{os.getpid()}-{next(_numbers)}"
    try:
        for side, address in (("a", "198.18.0.1"), ("b", "198.18.0.2")):
            ip("netns", "add", f"{name}-{side}")
            if side == "b":
                ip(
                    "link",
                    "add",
                    "net0",
                    "netns",
                    f"{name}-a",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "net0",
                    "netns",
                    f"{name}-b",
                )
                for end, host in (("a", "198.18.0.1"), ("b", address)):
                    lines = [
                        "link set lo up",
                        "link set net0 addrgenmode none",
                        f"addr add {host}/24 dev net0",
                        "link set net0 up",
                    ]
                    ip("-n", f"{name}-{end}", "-batch", "-", batch="\n".join(lines))
        yield name
    finally:
        for side in "ab":
            subprocess.run(["ip", "netns", "del", f"{name}-{side}"], capture_output=True, timeout=20, check=False)


_numbers = itertools.count()
_CLONE_NEWNET = 0x40000000


def enter(name: str, culprit: bool) -> None:
    """Move this thread, and what it starts, into one side of a network: the culprit is alone on its side."""
    with open(f"/var/run/netns/{name}-{'b' if culprit else 'a'}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def cut(name: str) -> None:
    ip("-n", f"{name}-b", "link", "set", "net0", "down")


def listening_in(name: str) -> socket.socket:
    """A listener on the survivors' side."""
    made: list[socket.socket] = []

    def body() -> None:
        enter(name, culprit=False)
        made.append(listen("198.18.0.1", 0))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10)
    return made[0]


# ------------------------------------------------------------------ what is left


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


# ------------------------------------------------------------------ the matrix

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
    overloaded = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)  # then a process may wait a second for its turn alone
    limit = (CALL_SECONDS if cell.starts else START_SECONDS) + SLACK * (2 if overloaded else 1)
    limit = 5 * HOST_SECONDS if cell.fault == "dead host" else limit
    for rank, o in enumerate(outcomes):
        if cell.fault in HARMLESS:
            fine = not o.error and o.good == 3 and not o.left
        elif rank == cell.culprit:
            fine = o.error not in ("hangs", "") and not o.left
        else:
            kind = KINDS[cell.fault] if cell.starts else "RendezvousError"
            fine = o.error == kind and o.named == cell.culprit and o.seconds < limit and not o.left
            fine = fine and (o.again == kind if cell.starts else True)
        if not fine:
            wrong.append(f"{cell.topology} x {cell.world_size}, rank {rank} (culprit {cell.culprit}): {o}")
    return wrong


@pytest.fixture(scope="module", autouse=True)
def spoiled() -> Iterator[None]:
    multiprocessing.util.get_temp_dir()  # now, and not in a test's own folder
    StoreServer([listen("127.0.0.1", 0)], SECRET).close()  # libuv opens a pipe for its signals once in a process
    with faulty.hellos_spoiled():
        yield


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.ForkServerContext:
    """Forks ranks off a process that has imported everything: 28 at once must not cost 28 times the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "test_faults"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files of others must not be taken for ours."""
    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", [*FATAL, *HARMLESS])
def test_matrix(fault: str, phase: str, request: pytest.FixtureRequest) -> None:
    cells = [Cell(fault, phase, topology, n) for topology in TOPOLOGIES for n in (3, 4)]
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
    cells = [Cell("dead host", "first", topology, 3) for topology in TOPOLOGIES]
    with contextlib.ExitStack() as stack:
        outcomes = run_processes(cells, [stack.enter_context(network()) for _ in cells], processes)
    wrong = [text for cell in cells for text in judge(cell, outcomes[cell])]
    assert not wrong, "\n".join(wrong)
