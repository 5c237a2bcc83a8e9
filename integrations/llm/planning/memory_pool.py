"""How much memory a rank may still take, and from which pool: an accelerator's, a cgroup's or the machine's."""

from __future__ import annotations

import platform
import uuid
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_UNLIMITED = 1 << 60  # cgroups of version 1 write a number near 2^63


def find_pool(device: str = "cpu", index: int = 0) -> tuple[str, int | None]:
    """The pool that a rank on this device takes its memory from, and the bytes that are left in it; None: unknown.

    Ranks that get the same name share the bytes.
    """
    if device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(index)
        return f"{machine()} cuda:{index}", free
    name, left = machine(), machine_left()
    for group, free in cgroups_left():
        if left is None or free < left:
            name, left = f"{machine()} {group}", free
    return name, left


def machine(proc: Path = PROC) -> str:
    """The same for all processes of one machine, as long as it runs."""
    boot = proc / "sys/kernel/random/boot_id"
    if boot.exists():
        return boot.read_text(encoding="ascii").strip()
    return f"{platform.node()} {uuid.getnode():x}"


def machine_left(proc: Path = PROC) -> int | None:
    """Bytes that the machine can still give away without swapping."""
    try:
        text = (proc / "meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return 1024 * int(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else None


def cgroups_left(proc: Path = PROC, root: Path = CGROUP) -> list[tuple[str, int]]:
    """Of each cgroup above this process that limits memory: its path, and the bytes that are left in it."""
    try:
        rows = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for row in rows:
        _, controllers, path = row.split(":", 2)
        if controllers == "":
            files = (root / path.lstrip("/"), "memory.max", "memory.current", "inactive_file")
            top = root
        elif "memory" in controllers.split(","):
            top = root / "memory"
            files = (top / path.lstrip("/"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder, limit, usage, reclaimable = files
        for group in (folder, *folder.parents):
            if (left := _left(group, limit, usage, reclaimable)) is not None:
                found.append((str(group), left))
            if group == top:
                break
    return found


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """None where this group has no limit, or can't be seen from here."""
    try:
        most = (group / limit).read_text(encoding="ascii").strip()
        if most == "max" or int(most) >= _UNLIMITED:
            return None
        used = int((group / usage).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(most) - used + int(stat.get(reclaimable, 0)))


def last_cache_nbytes(caches: Path = CPU_CACHES) -> int:
    """Of the largest cache of a core; 0 where the system doesn't say."""
    sizes = [0]
    for size in caches.glob("index*/size"):
        text = size.read_text(encoding="ascii").strip()
        sizes.append(int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1))
    return max(sizes)
