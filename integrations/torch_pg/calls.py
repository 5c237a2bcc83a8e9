"""How a group's calls are carried out: at once in the calling thread, as queued work, or as a part of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

import hostring
from hostring.integrations.torch_pg import profiling
from hostring.integrations.torch_pg.async_work import UNSET, CommWork, handle
from hostring.integrations.torch_pg.device_streams import in_order
from hostring.integrations.torch_pg.islands.collectives import Islands

Timeout = timedelta | None


class Calls:
    """The calls of one group.

    Attributes:
        comm: the ranks.
        collectives: `comm`, or islands, which carry out all_reduce, reduce_scatter, all_gather, broadcast, all_to_all.
        default_timeout: of calls that name none.
        batch: the works begun since `_start_coalescing`; None outside of a batch.
    """

    def __init__(self, comm: hostring.Comm, timeout: timedelta, islands: Islands | None = None) -> None:
        self.comm, self.default_timeout = comm, timeout
        self.collectives: Any = comm if islands is None else islands
        self.batch: list[hostring.Work] | None = None
        self._extra: list[float] = []  # seconds that the next call gets besides its timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Give later calls this long, unless they name another timeout."""
        self.default_timeout = timeout
        self.comm.timeout = timeout.total_seconds()

    def add_time(self, timeout: timedelta) -> None:
        """Give the next call this much more."""
        self._extra.append(timeout.total_seconds())

    def seconds(self, timeout: Timeout) -> float | None:
        """A call's timeout for the Comm; None is the group's own."""
        given = None if timeout is None or timeout <= UNSET else timeout.total_seconds()
        if not self._extra:
            return given
        extra, self._extra = sum(self._extra), []
        return (self.comm.timeout if given is None else given) + extra

    def run(
        self, name: profiling.Name, job: Callable[[], Any], outputs: Any, opts: Any, tensors: Sequence[torch.Tensor]
    ) -> CommWork | None:
        """Carry out `job`, which calls blocking collectives and fills `outputs`. Returns a work for a queued call."""
        queued = opts.asyncOp or self.batch is not None
        if profiling.enabled():
            job = profiling.carried_out(name, job, queued=queued)
        if queued:
            begin = in_order(job, tensors)
            return self.queue(name, outputs, lambda: self.comm.turn(begin, what=name.call, async_op=True))
        if profiling.enabled():
            with profiling.caller(name):
                self.comm.turn(job, what=name.call)
        else:
            self.comm.turn(job, what=name.call)
        return None

    def queue(self, name: profiling.Name, outputs: Any, begin: Callable[[], hostring.Work]) -> CommWork:
        """`begin` an asynchronous call that writes `outputs`."""
        if profiling.enabled():
            with profiling.caller(name):
                work = begin()
                profiling.until_done(name, work)
        else:
            work = begin()
        if self.batch is not None:
            self.batch.append(work)
        return handle(outputs, work)
