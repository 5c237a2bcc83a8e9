"""What this host is: the CPUs that this process may use, and names by which ranks of one machine know each other."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from dataclasses import dataclass
from functools import cache


def usable_cores() -> list[int]:
    """CPU numbers that this process may run on, ascending."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota() -> float | None:
    """CPUs' worth of time that the control groups above this process allow; None without a limit."""
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


@dataclass(frozen=True)
class HostInfo:
    """What one process sees of its host.

    Attributes:
        host_id: equal for processes that share a machine, and so its cores. Containers of one machine share it too.
        net_id: equal for processes that reach each other over loopback.
        hostname: for messages.
        cores: usable CPU numbers, ascending: what the affinity mask leaves.
        cpu_quota: CPUs that the control group allows, which may be a fraction; None without a limit.
    """

    host_id: str
    net_id: str
    hostname: str
    cores: list[int]
    cpu_quota: float | None


def this_host() -> HostInfo:
    """As this process sees it now; its quota as its first group saw it."""
    machine, quota = _machine_and_quota()
    net_id = _short(f"{machine} {_inode('/proc/self/ns/net')}")
    return HostInfo(_short(machine), net_id, socket.gethostname()[:64], usable_cores(), quota)


@cache
def _machine_and_quota() -> tuple[str, float | None]:
    """Read once: it takes a file for every level of the control groups, and programs make many groups."""
    machine = _read("/proc/sys/kernel/random/boot_id") or f"{platform.node()} {platform.machine()}"
    return machine, cpu_quota()


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
