"""What one rank tells the others about itself."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import platform
import socket
import sys
from dataclasses import dataclass
from typing import Any

from hostring.store.protocol import typed

_CORES_LIMIT = 8192


@dataclass(frozen=True)
class Member:
    """One rank, as the others know it.

    Attributes:
        host_id: equal for ranks that share a machine, and so its cores. Containers of one machine share it too.
        net_id: equal for ranks that reach each other over loopback.
        hostname: for messages.
        pid: process id on its machine.
        cores: usable CPU numbers, ascending: what the affinity mask leaves.
        cpu_quota: CPUs that the control group allows, which may be a fraction; None without a limit.
        addresses: where its listener waits, as (host, port), best first; a host starting with "/" is a UNIX path,
            one starting with "@" the name of a UNIX socket that is no file.
        software: versions.
        isa: instruction set.
    """

    host_id: str
    net_id: str
    hostname: str
    pid: int
    cores: list[int]
    cpu_quota: float | None
    addresses: list[tuple[str, int]]
    software: str
    isa: str

    def to_wire(self) -> dict[str, Any]:
        """A dict that msgpack takes."""
        wire = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        wire["cores"] = _runs(self.cores)
        return wire

    @classmethod
    def from_wire(cls, wire: Any) -> Member:
        """Raises: ValueError, when this is not what `to_wire` gives."""
        if not isinstance(wire, dict):
            raise ValueError("not a description of a rank")
        runs = [(typed(run, 0, int), typed(run, 1, int)) for run in typed(wire, "cores", list)]
        cores = itertools.chain.from_iterable(range(first, first + n) for first, n in runs)
        quota = wire.get("cpu_quota")
        return cls(
            host_id=typed(wire, "host_id", str),
            net_id=typed(wire, "net_id", str),
            hostname=typed(wire, "hostname", str),
            pid=typed(wire, "pid", int),
            cores=list(itertools.islice(cores, _CORES_LIMIT)),
            cpu_quota=None if quota is None else typed(wire, "cpu_quota", float),
            addresses=[(typed(pair, 0, str), typed(pair, 1, int)) for pair in typed(wire, "addresses", list)],
            software=typed(wire, "software", str),
            isa=typed(wire, "isa", str),
        )


def this_member(addresses: list[tuple[str, int]]) -> Member:
    """Describe this process."""
    machine = _read("/proc/sys/kernel/random/boot_id") or f"{platform.node()} {platform.machine()}"
    return Member(
        host_id=_short(machine),
        net_id=_short(f"{machine} {_inode('/proc/self/ns/net')}"),
        hostname=socket.gethostname()[:64],
        pid=os.getpid(),
        cores=usable_cores(),
        cpu_quota=cpu_quota(),
        addresses=addresses,
        software=_software(),
        isa=_isa(),
    )


def usable_cores() -> list[int]:
    """CPU numbers that this process may run on, ascending."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota() -> float | None:
    """CPUs' worth of time that the control groups above this process allow; None without a limit, or where there are none."""
    limits = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = f"/sys/fs/cgroup/{controllers}" if controllers else "/sys/fs/cgroup"
        parts = [p for p in path.split("/") if p]
        for depth in range(len(parts) + 1):  # the tightest of all levels counts
            limits.append(_quota_at("/".join([root, *parts[:depth]])))
    found = [limit for limit in limits if limit is not None]
    return min(found) if found else None


def _quota_at(folder: str) -> float | None:
    quota, _, period = _read(f"{folder}/cpu.max").partition(" ")  # version 2: "max 100000" or "150000 100000"
    if not quota:  # version 1
        quota, period = _read(f"{folder}/cpu.cfs_quota_us"), _read(f"{folder}/cpu.cfs_period_us")
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


@functools.cache
def _software() -> str:
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"{package} (not installed)"

    return f"{of('hostring')}, {of('numpy')}, {platform.python_implementation()} {platform.python_version()}, {platform.system()}"


@functools.cache
def _isa() -> str:
    flags: set[str] = set()
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            break
    known = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "asimdhp", "bf16", "sve")
    return " ".join([platform.machine(), sys.byteorder, *(flag for flag in known if flag in flags)])


def _runs(cores: list[int]) -> list[list[int]]:
    """[first, count] pairs: a mask of many CPUs stays short."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and runs[-1][0] + runs[-1][1] == core:
            runs[-1][1] += 1
        else:
            runs.append([core, 1])
    return runs


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20).strip()
    except OSError:
        return ""


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
