"""Which core a rank runs on. The one place that pins processes to cores."""

from __future__ import annotations

import os

from hostring.group.host_info import usable_cores


def core_for(local_rank: int) -> int:
    """The core of the rank with this number on its host. Ranks share cores when there are more ranks than cores."""
    cores = usable_cores()
    return cores[local_rank % len(cores)]


def pin(local_rank: int, ranks: int | None = None) -> None:
    """Restrict this process to cores of its own. Does nothing where the system has no affinity masks.

    Call it before a library starts threads: each of them keeps the mask that it starts with.

    Args:
        local_rank: this rank's number among those of its host.
        ranks: how many ranks share the host's cores evenly; with fewer cores than ranks none is pinned. When not given,
            the process gets exactly one core, and OMP_NUM_THREADS is set to 1.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    if ranks is None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.sched_setaffinity(0, {core_for(local_rank)})
        return
    cores = usable_cores()
    each = len(cores) // ranks
    if each:
        os.sched_setaffinity(0, cores[local_rank * each : (local_rank + 1) * each])
