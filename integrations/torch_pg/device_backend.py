"""From torch 2.14 on: the backend that C++ finds for a device. It hands every call to a process group of ours."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from hostring.integrations.torch_pg.async_work import handle
from hostring.integrations.torch_pg.process_group import ProcessGroup

_Backend: Any = c10d.Backend

_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allreduce_sparse", "broadcast", "reduce", "allgather", "allgather_coalesced",
    "all_gather_single", "_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather",
    "gather_single", "gather_into_tensor", "scatter", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "alltoall", "all_to_all_single",
    "alltoall_base", "barrier", "send", "recv", "recv_anysource", "_end_coalescing",
)  # fmt: skip
_OTHERS = (
    "_start_coalescing", "set_timeout", "_set_default_timeout", "_add_ephemeral_timeout", "_wait_for_pending_works",
    "_set_sequence_number_for_group", "_get_sequence_number_for_group", "eager_connect_single_device", "shutdown",
    "abort", "supports_tensor_alloc",
)  # fmt: skip


class DeviceBackend(_Backend):  # type: ignore[misc]
    """Forwards to `group`.

    Args:
        group: carries the calls out.
        owner: whether this keeps `group` alive; otherwise `group` keeps this alive.
    """

    def __init__(self, group: ProcessGroup, timeout: timedelta, *, owner: bool) -> None:
        super().__init__(group.getRank(), group.getSize())
        self.group: Callable[[], ProcessGroup | None] = (lambda: group) if owner else weakref.ref(group)
        self._options = c10d.Backend.Options("hostring", timeout)

    def getBackendName(self) -> str:
        return "hostring"

    name = _get_backend_name = getBackendName

    @property
    def options(self) -> Any:
        return self._options

    def monitored_barrier(self, opts: c10d.BarrierOptions, wait_all_ranks: bool = False) -> None:
        self._forwarded().monitored_barrier(opts.timeout, wait_all_ranks)

    def _forwarded(self) -> Any:
        group = self.group()
        if group is None:
            raise RuntimeError("this process group is gone")
        return group

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False


def _forward(name: str, gives_work: bool) -> Callable[..., Any]:
    def method(self: DeviceBackend, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._forwarded(), name)(*args, **kwargs)
        return (
            handle(args[0] if args else []) if result is None and gives_work else result
        )  # C++ takes no None for a work

    method.__name__ = name
    return method


for _name in _COLLECTIVES:
    setattr(DeviceBackend, _name, _forward(_name, True))
for _name in _OTHERS:
    setattr(DeviceBackend, _name, _forward(_name, False))
