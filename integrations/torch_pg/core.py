"""What every method of the process group needs: the Comm, and one way to carry a call out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

import hostring
from hostring.integrations.torch_pg.streams import in_order
from hostring.integrations.torch_pg.work import AllOf, CommWork, handle, seconds

Tensor = torch.Tensor
Timeout = timedelta | None
_TorchGroup: Any = c10d.ProcessGroup  # torch's stubs declare overloads that no override can satisfy


class Core(_TorchGroup):  # type: ignore[misc]
    """A process group's identity and state, without a collective."""

    def __init__(self, comm: hostring.Comm, store: Any, timeout: timedelta, split: Callable[..., Any]) -> None:
        super().__init__(comm.rank, comm.world_size)
        self.comm = comm
        self._store, self._split = store, split
        self._batch: list[hostring.Work] | None = None  # between _start_coalescing and _end_coalescing
        self._extra: list[float] = []  # seconds that the next call gets besides its timeout
        self._group_name = self._desc = ""
        self._default_timeout = timeout

    # ------------------------------------------------------------------ identity, under both of the names that c10d uses

    def getRank(self) -> int:
        return self.comm.rank

    rank = getRank

    def getSize(self) -> int:
        return self.comm.world_size

    size = getSize

    def getBackendName(self) -> str:
        return "hostring"

    name = _get_backend_name = getBackendName

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:
        return self._group_name

    group_name = property(getGroupName)

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_desc = setGroupDesc

    def getGroupDesc(self) -> str:
        return self._desc

    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Any:
        return self._store

    def __repr__(self) -> str:
        return f"<hostring process group {self._group_name or '(unnamed)'}, rank {self.comm.rank} of {self.comm.world_size}>"

    # ------------------------------------------------------------------ what frameworks ask of the backend behind a device

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return [torch.device("cpu"), *([torch.device(accelerator.type)] if accelerator is not None else [])]

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def options(self) -> Any:
        """None: torch's options have no word of ours. A group that is split from this one takes over what this one was given."""
        return None

    def split_group(
        self, ranks: Sequence[int], timeout: Timeout = None, opts: Any = None, group_name: str | None = None,
        group_desc: str | None = None, device_types: Any = None,
    ) -> Any:  # fmt: skip
        """A group of `ranks` of this one, with links of its own; None for a rank that is not among them."""
        if self.comm.rank not in ranks:
            return None
        prefix = c10d.PrefixStore(f"{group_name or ','.join(map(str, ranks))}/", self._store)
        options = self.comm if opts is None else opts  # its topology, order and wire are this group's
        child = self._split(
            prefix, sorted(ranks).index(self.comm.rank), len(ranks), timeout or self._default_timeout, options
        )
        child.setGroupName(group_name or "")
        child.setGroupDesc(group_desc or "")
        return child

    splitGroup = split_group

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Ranks outside a new group have nothing to do."""

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """All links are there from the start."""

    def _set_sequence_number_for_group(self) -> None:
        """Calls are numbered from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return sum(self.comm.counters.calls.values())

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self.comm.turn(lambda: None)

    # ------------------------------------------------------------------ time

    def set_timeout(self, timeout: timedelta) -> None:
        """Give later calls this long, unless they say otherwise."""
        self._default_timeout = timeout
        self.comm.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        self._extra.append(timeout.total_seconds())

    def _seconds(self, timeout: timedelta | None) -> float | None:
        """A call's timeout for the Comm."""
        given = seconds(timeout)
        if not self._extra:
            return given
        extra, self._extra = sum(self._extra), []
        return (self.comm.timeout if given is None else given) + extra

    # ------------------------------------------------------------------ carrying out

    def _run(
        self, what: str, job: Callable[[], Any], outputs: Any, opts: Any, tensors: Sequence[Tensor]
    ) -> CommWork | None:
        """Carry out `job`, which calls blocking collectives and fills `outputs`: here, or as queued work when it was asked for."""
        if opts.asyncOp or self._batch is not None:
            return self._queued(outputs, self.comm.turn(in_order(job, tensors), what=what, async_op=True))
        self.comm.turn(job, what=what)
        return None

    def _queued(self, outputs: Any, work: hostring.Work) -> CommWork:
        if self._batch is not None:
            self._batch.append(work)
        return handle(outputs, work)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> CommWork:
        works, self._batch = self._batch, None
        return handle([], AllOf(works) if works else None)
