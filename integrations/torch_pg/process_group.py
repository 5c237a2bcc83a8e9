"""The process group that torch sees. It has all methods that c10d calls, and each calls one part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

import hostring
from hostring.integrations.torch_pg.async_work import CommWork
from hostring.integrations.torch_pg.barriers import Barriers
from hostring.integrations.torch_pg.calls import Calls, Timeout
from hostring.integrations.torch_pg.data_movement import DataMovement
from hostring.integrations.torch_pg.islands.choice import Choice
from hostring.integrations.torch_pg.islands.collectives import Islands
from hostring.integrations.torch_pg.point_to_point import PointToPoint
from hostring.integrations.torch_pg.reductions import Reductions
from hostring.integrations.torch_pg.subgroups import Subgroups

Tensor = torch.Tensor
_TorchGroup: Any = c10d.ProcessGroup  # torch's stubs declare overloads that no override can satisfy


class ProcessGroup(_TorchGroup):  # type: ignore[misc]
    """All ranks of one `hostring.Comm`.

    Methods take the two forms that torch's own take. As with NCCL, a blocking call returns no work.

    Args:
        comm: the ranks, and the links between them.
        store: torch's store of this group.
        timeout: of calls that name none.
        connect: makes the groups that are split from this one; see `new_group.connect`.
        islands: what joins ranks of one vendor; None where hostring joins all.
        choice, names: see `Subgroups`.
    """

    def __init__(
        self, comm: hostring.Comm, store: Any, timeout: timedelta, connect: Callable[..., Any],
        islands: Islands | None = None, choice: Choice | None = None, names: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(comm.rank, comm.world_size)
        self.comm, self.islands = comm, islands
        self._store = store
        self._group_name = self._desc = ""
        self._calls = Calls(comm, timeout, islands)
        self._reductions = Reductions(self._calls)
        self._data_movement = DataMovement(self._calls)
        self._point_to_point = PointToPoint(self._calls)
        self._barriers = Barriers(self._calls, store)
        self._subgroups = Subgroups(self._calls, store, connect, choice, names)

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Timeout = None) -> CommWork | None:
        return self._reductions.all_reduce(tensors, opts, op, timeout)

    allreduce_sparse = allreduce

    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: Any = None, op: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._reductions.all_reduce_coalesced(tensors, opts, op, timeout)

    def reduce(
        self, tensors: Any, opts: Any = None, root: int | None = None, op: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._reductions.reduce(tensors, opts, root, op, timeout)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, op: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._reductions.reduce_scatter(outputs, inputs, opts, op, timeout)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, op: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._reductions.reduce_scatter_single(output, input, opts, op, timeout)

    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CommWork | None:
        return self._reductions.reduce_scatter_single_coalesced(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------------ data movement

    def broadcast(
        self, tensors: Any, opts: Any = None, root: int | None = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._data_movement.broadcast(tensors, opts, root, timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> CommWork | None:
        return self._data_movement.all_gather(outputs, inputs, opts, timeout)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> CommWork | None:
        return self._data_movement.all_gather_coalesced(outputs, inputs, opts)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._data_movement.all_gather_single(output, input, opts, timeout)

    _allgather_base = all_gather_into_tensor = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CommWork | None:
        return self._data_movement.all_gather_single_coalesced(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, root: int | None = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._data_movement.gather(outputs, inputs, opts, root, timeout)

    def gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._data_movement.gather_single(output, input, opts, timeout)

    gather_into_tensor = gather_single

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, root: int | None = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._data_movement.scatter(outputs, inputs, opts, root, timeout)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._data_movement.all_to_all(outputs, inputs, opts, timeout)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int],
        opts: Any = None, timeout: Timeout = None,
    ) -> CommWork | None:  # fmt: skip
        return self._data_movement.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, opts, timeout
        )

    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------ point to point, and batches of it

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> CommWork:
        return self._point_to_point.send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int | None, tag: int = 0) -> CommWork:
        return self._point_to_point.recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> CommWork:
        return self._point_to_point.recv(tensors, None, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        self._point_to_point.start_batch()

    def _end_coalescing(self, device: torch.device) -> CommWork:
        return self._point_to_point.end_batch()

    # ------------------------------------------------------------------ the group

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> CommWork | None:
        return self._barriers.barrier(opts, timeout)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        self._barriers.monitored_barrier(timeout, wait_all_ranks)

    def split_group(
        self, ranks: Sequence[int], timeout: Timeout = None, opts: Any = None, group_name: str | None = None,
        group_desc: str | None = None, device_types: Any = None,
    ) -> Any:  # fmt: skip
        return self._subgroups.split(ranks, timeout, opts, group_name, group_desc)

    splitGroup = split_group

    def set_timeout(self, timeout: timedelta) -> None:
        self._calls.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        self._calls.add_time(timeout)

    def _wait_for_pending_works(self) -> None:
        self.comm.turn(lambda: None)

    def shutdown(self) -> None:
        """Finish what was accepted, say goodbye, and close the links."""
        self.comm.close()
        if self.islands is not None:
            self.islands.close()

    def abort(self) -> None:
        """End the group on all ranks now."""
        reason = "torch's process group was aborted"
        self.comm.abort(reason)
        if self.islands is not None:
            self.islands.abort(reason)

    # ------------------------------------------------------------------ identity, under both names that c10d uses

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
        name = self._group_name or "(unnamed)"
        return f"<hostring process group {name}, rank {self.comm.rank} of {self.comm.world_size}>"

    # ------------------------------------------------------------------ what frameworks ask of a device's backend

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return [torch.device("cpu"), *([torch.device(accelerator.type)] if accelerator is not None else [])]

    @property
    def options(self) -> Any:
        """None: torch's options can't hold ours. A group that is split from this one takes over this one's."""
        return None

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
