"""Collectives over lists of tensors. The Comm moves one buffer; lists are packed into it and taken out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from hostring.integrations.torch_pg.core import Core
from hostring.integrations.torch_pg.options import OPS, PREMUL, factor, given, listed, listed_twice
from hostring.integrations.torch_pg.work import CommWork

Tensor = torch.Tensor
Timeout = timedelta | None


class Lists(Core):
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> CommWork | None:
        outputs, inputs = listed_twice(outputs), listed(inputs)
        opts = given(c10d.AllgatherOptions, opts, timeout=timeout)
        return self._run("all_gather", self._all_gather_job(outputs, inputs, opts), outputs, opts, inputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> CommWork | None:
        """Torch 2.13 gives the outputs as [rank][input]."""
        opts = given(c10d.AllgatherOptions, opts)
        by_input = [list(of_one) for of_one in zip(*outputs, strict=True)]
        return self._run("all_gather", self._all_gather_job(by_input, inputs, opts), outputs, opts, inputs)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CommWork | None:
        opts = given(c10d.AllgatherOptions, opts)
        seconds = self._seconds(opts.timeout)
        for output, input in zip(outputs, inputs, strict=True):
            self._check_shares("all_gather", output, input)

        def job() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                self.comm.all_gather(input, out=output, timeout=seconds)

        return self._run("all_gather", job, outputs, opts, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, root: int | None = None, timeout: Timeout = None
    ) -> CommWork | None:
        outputs, inputs = listed_twice(outputs), listed(inputs)
        opts = given(c10d.GatherOptions, opts, rootRank=root, timeout=timeout)
        root, seconds = opts.rootRank, self._seconds(opts.timeout)
        self._check_root("gather", root, outputs, "output")

        def job() -> None:
            for k, input in enumerate(inputs):
                gathered = self.comm.gather(input, root, timeout=seconds)
                if gathered is not None:
                    _fill(outputs[k], gathered)

        return self._run("gather", job, outputs, opts, inputs)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, root: int | None = None, timeout: Timeout = None
    ) -> CommWork | None:
        outputs, inputs = listed(outputs), listed_twice(inputs)
        opts = given(c10d.ScatterOptions, opts, rootRank=root, timeout=timeout)
        root, seconds = opts.rootRank, self._seconds(opts.timeout)
        self._check_root("scatter", root, inputs, "input")

        def job() -> None:
            for k, output in enumerate(outputs):
                parts = torch.stack([t.detach() for t in inputs[k]]) if self.comm.rank == root else None
                self.comm.scatter(parts, root, out=output, timeout=seconds)

        return self._run("scatter", job, outputs, opts, outputs)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, op: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        outputs, inputs = listed(outputs), listed_twice(inputs)
        opts = given(c10d.ReduceScatterOptions, opts, reduceOp=op, timeout=timeout)
        return self._run("reduce_scatter", self._reduce_scatter_job(outputs, inputs, opts), outputs, opts, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CommWork | None:
        opts = given(c10d.ReduceScatterOptions, opts)
        for output, input in zip(outputs, inputs, strict=True):
            self._check_shares("reduce_scatter", input, output)
        return self._run("reduce_scatter", self._reduce_scatter_job(outputs, inputs, opts), outputs, opts, inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: Timeout = None
    ) -> CommWork | None:
        opts = given(c10d.AllToAllOptions, opts, timeout=timeout)
        seconds = self._seconds(opts.timeout)
        send, recv = [t.numel() for t in inputs], [t.numel() for t in outputs]

        def job() -> None:
            packed = torch.cat([t.detach().reshape(-1) for t in inputs])
            got = torch.empty(sum(recv), dtype=outputs[0].dtype, device=outputs[0].device)
            self.comm.all_to_all(packed, send_counts=send, recv_counts=recv, out=got, timeout=seconds)
            _fill(outputs, torch.split(got, recv))

        return self._run("all_to_all", job, outputs, opts, inputs)

    # ------------------------------------------------------------------ shared steps

    def _all_gather_job(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Callable[[], None]:
        """`outputs[k][r]` gets `inputs[k]` of rank r. Their sizes may differ from rank to rank, if every rank knows them."""
        seconds = self._seconds(opts.timeout)
        for k, input in enumerate(inputs):
            if len(outputs[k]) != self.comm.world_size or outputs[k][self.comm.rank].numel() != input.numel():
                sizes = [t.numel() for t in outputs[k]]
                raise ValueError(
                    f"all_gather: rank {self.comm.rank} of {self.comm.world_size} brings {input.numel()} elements, outputs have {sizes}"
                )

        def job() -> None:
            for k, input in enumerate(inputs):
                sizes = [t.numel() for t in outputs[k]]
                if len(set(sizes)) == 1:
                    _fill(outputs[k], self.comm.all_gather(input, timeout=seconds))
                else:
                    _fill(
                        outputs[k], self.comm.all_gather(input.reshape(-1), counts=sizes, timeout=seconds).split(sizes)
                    )

        return job

    def _reduce_scatter_job(self, outputs: list[Tensor], inputs: Sequence[Any], opts: Any) -> Callable[[], None]:
        """Each input is a tensor with equal parts, or a list of tensors, one for each rank."""
        name, seconds = OPS[hash(opts.reduceOp)], self._seconds(opts.timeout)
        scale = factor(opts.reduceOp) if name == PREMUL else None

        def job() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                many = isinstance(parts, (list, tuple))
                x = torch.cat([t.detach().reshape(-1) for t in parts]) if many else parts
                counts = [t.numel() for t in parts] if many else None
                if scale is not None:
                    x = x.detach() * scale
                self.comm.reduce_scatter(
                    x, "sum" if scale is not None else name, counts=counts, out=output, timeout=seconds
                )

        return job

    def _check_shares(self, what: str, whole: Tensor, share: Tensor) -> None:
        if whole.numel() != share.numel() * self.comm.world_size:
            raise ValueError(
                f"{what}: the whole has {whole.numel()} elements, a rank's share {share.numel()}; it must be {self.comm.world_size} shares"
            )
        if whole.dtype != share.dtype:
            raise TypeError(f"{what}: the whole is {whole.dtype}, a rank's share {share.dtype}; they must be the same")

    def _check_root(self, what: str, root: int, lists: list[list[Tensor]], name: str) -> None:
        n = self.comm.world_size
        if self.comm.rank == root and (not lists or any(len(of_one) != n for of_one in lists)):
            raise ValueError(f"{what}: root {root} must give {n} {name} tensors, one for each rank")
        if self.comm.rank != root and any(lists):
            raise ValueError(f"{what}: only root {root} gives {name} tensors, rank {self.comm.rank} gave some too")

    def _splits(self, name: str, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
        n, rows = self.comm.world_size, tensor.shape[0]
        if not sizes:
            if rows % n:
                raise ValueError(
                    f"all_to_all: {rows} rows of {name} don't divide evenly over {n} ranks; give {name}_split_sizes"
                )
            return [rows // n] * n
        if len(sizes) != n or sum(sizes) != rows:
            raise ValueError(
                f"all_to_all: {name}_split_sizes={list(sizes)} must be {n} numbers that add up to {rows} rows"
            )
        return list(sizes)


def _fill(outputs: Sequence[Tensor], parts: Any) -> None:
    """Copy `parts` into `outputs`. Through `data`: outputs may need grad, and this thread's grad mode isn't the caller's."""
    for output, part in zip(outputs, parts, strict=True):
        output.data.copy_(part.view(output.shape) if part.shape != output.shape else part)
