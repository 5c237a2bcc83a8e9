"""The process group that torch gets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from hostring.integrations.torch_pg.core import Core
from hostring.integrations.torch_pg.lists import Lists
from hostring.integrations.torch_pg.messages import Messages
from hostring.integrations.torch_pg.options import OPS, PREMUL, factor, given, listed
from hostring.integrations.torch_pg.sparse import all_reduce_sparse
from hostring.integrations.torch_pg.streams import synchronize
from hostring.integrations.torch_pg.work import UNSET, CommWork

Tensor = torch.Tensor
Timeout = timedelta | None


class ProcessGroup(Lists, Messages, Core):
    """All ranks of one `hostring.Comm`, as c10d wants them.

    Methods take the two forms that torch's own take. Like NCCL's, they return no work for a call that was asked to block.
    """

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Timeout = None) -> CommWork | None:
        if type(opts) is not c10d.AllreduceOptions:
            tensors, opts = listed(tensors), given(c10d.AllreduceOptions, opts, reduceOp=op, timeout=timeout)
        name, tensor, timeout = OPS[hash(opts.reduceOp)], tensors[0], opts.timeout
        if name == PREMUL or tensor.is_sparse or len(tensors) > 1:
            return self._reductions(tensors, opts)
        if not opts.asyncOp and self._batch is None:
            self.comm.all_reduce(
                tensor, name, timeout=None if timeout < UNSET and not self._extra else self._seconds(timeout)
            )
            return None
        if tensor.is_cpu:
            return self._queued(
                tensors, self.comm.all_reduce(tensor, name, async_op=True, timeout=self._seconds(timeout))
            )
        return self._reductions(tensors, opts)

    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: Any = None, op: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        return self._reductions(tensors, given(c10d.AllreduceOptions, opts, reduceOp=op, timeout=timeout))

    allreduce_sparse = allreduce

    def _reductions(self, tensors: list[Tensor], opts: Any) -> CommWork | None:
        name, seconds = OPS[hash(opts.reduceOp)], self._seconds(opts.timeout)
        scale = factor(opts.reduceOp) if name == PREMUL else None

        def job() -> None:
            together: dict[Any, list[Tensor]] = {}
            for tensor in tensors:
                if tensor.is_sparse:
                    all_reduce_sparse(self.comm, tensor, name, seconds)
                    continue
                if scale is not None:
                    tensor.data.mul_(scale)
                folded_alike = "float" if tensor.is_floating_point() and tensor.itemsize <= 4 else tensor.dtype
                together.setdefault(folded_alike, []).append(tensor)
            for alike in together.values():
                self.comm.all_reduce_coalesced(alike, "sum" if scale is not None else name, timeout=seconds)

        return self._run("all_reduce", job, tensors, opts, tensors)

    def broadcast(
        self, tensors: Any, opts: Any = None, root: int | None = None, timeout: Timeout = None
    ) -> CommWork | None:
        tensors, opts = listed(tensors), given(c10d.BroadcastOptions, opts, rootRank=root, timeout=timeout)
        root, seconds = opts.rootRank, self._seconds(opts.timeout)

        def job() -> None:
            for tensor in tensors:
                self.comm.broadcast(tensor, root, timeout=seconds)

        return self._run("broadcast", job, tensors, opts, tensors)

    def reduce(
        self, tensors: Any, opts: Any = None, root: int | None = None, op: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        tensors, opts = listed(tensors), given(c10d.ReduceOptions, opts, rootRank=root, reduceOp=op, timeout=timeout)
        name, root, seconds = OPS[hash(opts.reduceOp)], opts.rootRank, self._seconds(opts.timeout)
        scale = factor(opts.reduceOp) if name == PREMUL else None

        def job() -> None:
            for tensor in tensors:
                x = tensor if scale is None else tensor.detach() * scale
                self.comm.reduce(x, root, "sum" if scale is not None else name, timeout=seconds)
                if scale is not None and self.comm.rank == root:
                    tensor.data.copy_(x)

        return self._run("reduce", job, tensors, opts, tensors)

    # ------------------------------------------------------------------ one tensor in, one out

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        opts = given(c10d.AllgatherOptions, opts, timeout=timeout)
        seconds = self._seconds(opts.timeout)
        self._check_shares("all_gather", output, input)
        return self._run(
            "all_gather",
            lambda: self.comm.all_gather(input, out=output, timeout=seconds),
            [output],
            opts,
            (input, output),
        )

    _allgather_base = all_gather_into_tensor = all_gather_single

    def gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        """Torch 2.14's: `output` is used on the root only."""
        opts = given(c10d.GatherOptions, opts, timeout=timeout)
        root, seconds = opts.rootRank, self._seconds(opts.timeout)
        mine = output if self.comm.rank == root else None
        if mine is not None:
            self._check_shares("gather", mine, input)
        return self._run(
            "gather", lambda: self.comm.gather(input, root, out=mine, timeout=seconds), [output], opts, (input,)
        )

    gather_into_tensor = gather_single

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, op: Any = None, timeout: Timeout = None
    ) -> CommWork | None:  # fmt: skip
        opts = given(c10d.ReduceScatterOptions, opts, reduceOp=op, timeout=timeout)
        self._check_shares("reduce_scatter", input, output)
        return self._run(
            "reduce_scatter", self._reduce_scatter_job([output], [input], opts), [output], opts, (input, output)
        )

    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], opts: Any = None,
        timeout: Timeout = None,
    ) -> CommWork | None:  # fmt: skip
        opts = given(c10d.AllToAllOptions, opts, timeout=timeout)
        seconds = self._seconds(opts.timeout)
        send = self._splits("input", input, input_split_sizes)
        recv = self._splits("output", output, output_split_sizes)

        def job() -> None:
            self.comm.all_to_all(input, send_counts=send, recv_counts=recv, out=output, timeout=seconds)

        return self._run("all_to_all", job, [output], opts, (input, output))

    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------ the group

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> CommWork | None:
        opts = given(c10d.BarrierOptions, opts, timeout=timeout)
        seconds = self._seconds(opts.timeout)
        if opts.device is not None and opts.device.type != "cpu":
            synchronize(opts.device)
        return self._run("barrier", lambda: self.comm.barrier(timeout=seconds), [], opts, ())

    def shutdown(self) -> None:
        """Finish what was accepted, say goodbye, and close the links."""
        self.comm.close()

    def abort(self) -> None:
        """End the group on all ranks now."""
        self.comm.abort("torch's process group was aborted")
