"""Point to point, and the barrier that says who is missing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from hostring import OperationTimeout
from hostring.integrations.torch_pg.core import Core
from hostring.integrations.torch_pg.work import CommWork

Tensor = torch.Tensor
Timeout = timedelta | None


class Messages(Core):
    _monitored = 0

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> CommWork:
        (tensor,) = tensors
        return self._queued(tensors, self.comm.send(tensor, dst, tag, async_op=True))

    def recv(self, tensors: list[Tensor], src: int | None, tag: int = 0) -> CommWork:
        (tensor,) = tensors
        return self._queued(tensors, self.comm.recv(tensor, src, tag, async_op=True))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> CommWork:
        return self.recv(tensors, None, tag)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """A barrier through the store, which works however stuck the group is. Rank 0 names who did not come.

        Raises:
            OperationTimeout: on rank 0 with the first missing rank, or all of them with `wait_all_ranks`; on the others with rank 0.
        """
        limit = self._default_timeout if timeout is None else timeout
        ms = int(limit.total_seconds() * 1000)
        self._monitored += 1
        store = c10d.PrefixStore(f"hostring/monitored_barrier/{self._monitored}", self._store)
        if self.comm.rank != 0:
            store.set(str(self.comm.rank), "here")
            if not _came(store, "all", limit.total_seconds()):
                raise OperationTimeout(
                    f"[Rank {self.comm.rank}]: Rank 0 timed out in monitoredBarrier after {ms} ms.", 0
                )
            return
        if ms <= 0:
            raise OperationTimeout(f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {ms} ms.", 0)
        deadline = time.monotonic() + limit.total_seconds()
        missing = []
        for rank in range(1, self.comm.world_size):
            if not _came(store, str(rank), deadline - time.monotonic()):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            names = ", ".join(map(str, missing))
            who = f"Ranks {names}" if len(missing) > 1 else f"Rank {names}"
            raise OperationTimeout(f"[Rank 0]: {who} failed to pass monitoredBarrier in {ms} ms", missing[0])
        store.set("all", "here")


def _came(store: Any, key: str, seconds: float) -> bool:
    """Whether `key` is in the store within `seconds`."""
    give_up = time.monotonic() + seconds
    while not store.check([key]):
        left = give_up - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(0.01, left))
    return True
