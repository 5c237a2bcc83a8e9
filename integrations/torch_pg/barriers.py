"""The barrier, and the monitored barrier that names who is missing."""

from __future__ import annotations

import time
from typing import Any

from torch._C import _distributed_c10d as c10d

from hostring import OperationTimeout
from hostring.integrations.torch_pg.async_work import CommWork
from hostring.integrations.torch_pg.call_options import given
from hostring.integrations.torch_pg.calls import Calls, Timeout
from hostring.integrations.torch_pg.device_streams import synchronize
from hostring.integrations.torch_pg.profiling import Name

BARRIER = Name("barrier", "c10d::barrier")
POLL_S = 0.01  # how often a rank looks into the store


class Barriers:
    def __init__(self, calls: Calls, store: Any) -> None:
        self._calls, self._comm, self._store = calls, calls.comm, store
        self._monitored = 0

    def barrier(self, opts: Any, timeout: Timeout) -> CommWork | None:
        opts = given(c10d.BarrierOptions, opts, timeout=timeout)
        seconds = self._calls.seconds(opts.timeout)
        if opts.device is not None and opts.device.type != "cpu":
            synchronize(opts.device)
        return self._calls.run(BARRIER, lambda: self._comm.barrier(timeout=seconds), [], opts, ())

    def monitored_barrier(self, timeout: Timeout, wait_all_ranks: bool) -> None:
        """A barrier through the store, which works even if the group is stuck. Rank 0 names the missing ranks.

        Raises:
            OperationTimeout: on rank 0 with the first missing rank, or all of them with `wait_all_ranks`; on the others
                with rank 0.
        """
        limit = self._calls.default_timeout if timeout is None else timeout
        ms = int(limit.total_seconds() * 1000)
        self._monitored += 1
        store = c10d.PrefixStore(f"hostring/monitored_barrier/{self._monitored}", self._store)
        if self._comm.rank != 0:
            store.set(str(self._comm.rank), "here")
            if not _came(store, "all", limit.total_seconds()):
                raise OperationTimeout(
                    f"[Rank {self._comm.rank}]: Rank 0 timed out in monitoredBarrier after {ms} ms.", 0
                )
            return
        if ms <= 0:
            raise OperationTimeout(f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {ms} ms.", 0)
        missing = self._missing(store, limit.total_seconds(), wait_all_ranks)
        if missing:
            names = ", ".join(map(str, missing))
            who = f"Ranks {names}" if len(missing) > 1 else f"Rank {names}"
            raise OperationTimeout(f"[Rank 0]: {who} failed to pass monitoredBarrier in {ms} ms", missing[0])
        store.set("all", "here")

    def _missing(self, store: Any, seconds: float, wait_all_ranks: bool) -> list[int]:
        deadline = time.monotonic() + seconds
        missing = []
        for rank in range(1, self._comm.world_size):
            if not _came(store, str(rank), deadline - time.monotonic()):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        return missing


def _came(store: Any, key: str, seconds: float) -> bool:
    """Whether `key` is in the store within `seconds`."""
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(POLL_S, left))
    return True
