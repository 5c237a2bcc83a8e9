"""Reductions: all_reduce, reduce and reduce_scatter, of one tensor and of lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from hostring.integrations.torch_pg import profiling
from hostring.integrations.torch_pg.async_work import CommWork
from hostring.integrations.torch_pg.call_options import OPS, PREMUL, factor, given
from hostring.integrations.torch_pg.calls import Calls, Timeout
from hostring.integrations.torch_pg.profiling import Name
from hostring.integrations.torch_pg.sparse_all_reduce import all_reduce_sparse
from hostring.integrations.torch_pg.tensor_lists import check_plain, check_shares, check_writable, listed, listed_twice

Tensor = torch.Tensor

ALL_REDUCE = Name("all_reduce", "c10d::allreduce_")
ALL_REDUCE_COALESCED = Name("all_reduce", "c10d::allreduce_coalesced_")
REDUCE = Name("reduce", "c10d::reduce_")
REDUCE_SCATTER = Name("reduce_scatter", "c10d::reduce_scatter_")
REDUCE_SCATTER_SINGLE = Name("reduce_scatter", "c10d::_reduce_scatter_base_")
REDUCE_SCATTER_COALESCED = Name("reduce_scatter", "c10d::reduce_scatter_tensor_coalesced_")


class Reductions:
    def __init__(self, calls: Calls) -> None:
        self._calls, self._comm, self._collectives = calls, calls.comm, calls.collectives
        self._direct = calls.collectives is calls.comm  # whether a call needs no turn of its own

    def all_reduce(self, tensors: Any, opts: Any, op: Any, timeout: Timeout) -> CommWork | None:
        if type(opts) is not c10d.AllreduceOptions:
            tensors, opts = listed(tensors), given(c10d.AllreduceOptions, opts, reduceOp=op, timeout=timeout)
        name, tensor, timeout = OPS[hash(opts.reduceOp)], tensors[0], opts.timeout
        if name == PREMUL or len(tensors) > 1 or tensor.is_sparse or profiling.enabled() or not self._direct:
            return self._all_reduce_each(ALL_REDUCE, tensors, opts)
        if not opts.asyncOp and self._calls.batch is None:
            self._comm.all_reduce(tensor, name, timeout=self._calls.seconds(timeout))
            return None
        if tensor.is_cpu:
            seconds = self._calls.seconds(timeout)
            return self._calls.queue(
                ALL_REDUCE, tensors, lambda: self._comm.all_reduce(tensor, name, async_op=True, timeout=seconds)
            )
        return self._all_reduce_each(ALL_REDUCE, tensors, opts)

    def all_reduce_coalesced(self, tensors: list[Tensor], opts: Any, op: Any, timeout: Timeout) -> CommWork | None:
        opts = given(c10d.AllreduceOptions, opts, reduceOp=op, timeout=timeout)
        return self._all_reduce_each(ALL_REDUCE_COALESCED, tensors, opts)

    def _all_reduce_each(self, name: Name, tensors: list[Tensor], opts: Any) -> CommWork | None:
        check_plain("all_reduce", tensors, sparse=True)
        op, seconds = OPS[hash(opts.reduceOp)], self._calls.seconds(opts.timeout)
        scale = factor(opts.reduceOp) if op == PREMUL else None
        if scale is not None:
            check_writable("all_reduce", tensors)

        def job() -> None:
            together: dict[Any, list[Tensor]] = {}
            for tensor in tensors:
                if tensor.is_sparse:
                    all_reduce_sparse(self._comm, tensor, op, seconds)
                    continue
                if scale is not None:
                    tensor.data.mul_(scale)
                folded_alike = "float" if tensor.is_floating_point() and tensor.itemsize <= 4 else tensor.dtype
                together.setdefault(folded_alike, []).append(tensor)
            for alike in together.values():
                self._collectives.all_reduce_coalesced(alike, "sum" if scale is not None else op, timeout=seconds)

        return self._calls.run(name, job, tensors, opts, tensors)

    def reduce(self, tensors: Any, opts: Any, root: int | None, op: Any, timeout: Timeout) -> CommWork | None:
        tensors, opts = listed(tensors), given(c10d.ReduceOptions, opts, rootRank=root, reduceOp=op, timeout=timeout)
        check_plain("reduce", tensors)
        name, root, seconds = OPS[hash(opts.reduceOp)], opts.rootRank, self._calls.seconds(opts.timeout)
        scale = factor(opts.reduceOp) if name == PREMUL else None
        if scale is not None:
            check_writable("reduce", tensors)

        def job() -> None:
            for tensor in tensors:
                x = tensor if scale is None else tensor.detach() * scale
                self._comm.reduce(x, root, "sum" if scale is not None else name, timeout=seconds)
                if scale is not None and self._comm.rank == root:
                    tensor.data.copy_(x)

        return self._calls.run(REDUCE, job, tensors, opts, tensors)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any, op: Any, timeout: Timeout) -> CommWork | None:
        outputs, inputs = listed(outputs), listed_twice(inputs)
        check_plain("reduce_scatter", chain(outputs, *inputs))
        opts = given(c10d.ReduceScatterOptions, opts, reduceOp=op, timeout=timeout)
        return self._calls.run(REDUCE_SCATTER, self._reduce_scatter_job(outputs, inputs, opts), outputs, opts, outputs)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any, op: Any, timeout: Timeout
    ) -> CommWork | None:
        opts = given(c10d.ReduceScatterOptions, opts, reduceOp=op, timeout=timeout)
        check_plain("reduce_scatter", (input, output))
        check_shares("reduce_scatter", input, output, self._comm.world_size)
        job = self._reduce_scatter_job([output], [input], opts)
        return self._calls.run(REDUCE_SCATTER_SINGLE, job, [output], opts, (input, output))

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> CommWork | None:
        opts = given(c10d.ReduceScatterOptions, opts)
        check_plain("reduce_scatter", chain(inputs, outputs))
        for output, input in zip(outputs, inputs, strict=True):
            check_shares("reduce_scatter", input, output, self._comm.world_size)
        job = self._reduce_scatter_job(outputs, inputs, opts)
        return self._calls.run(REDUCE_SCATTER_COALESCED, job, outputs, opts, inputs)

    def _reduce_scatter_job(self, outputs: list[Tensor], inputs: Sequence[Any], opts: Any) -> Callable[[], None]:
        """Each input is a tensor with equal parts, or a list of tensors, one for each rank."""
        name, seconds = OPS[hash(opts.reduceOp)], self._calls.seconds(opts.timeout)
        scale = factor(opts.reduceOp) if name == PREMUL else None
        check_writable("reduce_scatter", outputs)

        def job() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                many = isinstance(parts, (list, tuple))
                x = torch.cat([t.detach().reshape(-1) for t in parts]) if many else parts
                counts = [t.numel() for t in parts] if many else None
                if scale is not None:
                    x = x.detach() * scale
                op = "sum" if scale is not None else name
                self._collectives.reduce_scatter(x, op, counts=counts, out=output, timeout=seconds)

        return job
