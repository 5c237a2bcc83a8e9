"""Data movement: broadcast, all_gather, gather, scatter and all_to_all.

The Comm moves one buffer; lists of tensors are packed into it and taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from hostring.integrations.torch_pg.async_work import CommWork
from hostring.integrations.torch_pg.call_options import given
from hostring.integrations.torch_pg.calls import Calls, Timeout
from hostring.integrations.torch_pg.profiling import Name
from hostring.integrations.torch_pg.tensor_lists import (
    check_plain,
    check_root,
    check_shares,
    check_writable,
    fill,
    listed,
    listed_twice,
    splits,
)

Tensor = torch.Tensor

BROADCAST = Name("broadcast", "c10d::broadcast_")
ALL_GATHER = Name("all_gather", "c10d::allgather_")
ALL_GATHER_COALESCED = Name("all_gather", "c10d::allgather_coalesced_")
ALL_GATHER_SINGLE = Name("all_gather", "c10d::_allgather_base_")
ALL_GATHER_SINGLE_COALESCED = Name("all_gather", "c10d::allgather_into_tensor_coalesced_")
GATHER = Name("gather", "c10d::gather_")
SCATTER = Name("scatter", "c10d::scatter_")
ALL_TO_ALL = Name("all_to_all", "c10d::alltoall_")
ALL_TO_ALL_SINGLE = Name("all_to_all", "c10d::alltoall_base_")


class DataMovement:
    def __init__(self, calls: Calls) -> None:
        self._calls, self._comm, self._collectives = calls, calls.comm, calls.collectives

    def broadcast(self, tensors: Any, opts: Any, root: int | None, timeout: Timeout) -> CommWork | None:
        tensors, opts = listed(tensors), given(c10d.BroadcastOptions, opts, rootRank=root, timeout=timeout)
        root, seconds = opts.rootRank, self._calls.seconds(opts.timeout)
        check_plain("broadcast", tensors)

        def job() -> None:
            for tensor in tensors:
                self._collectives.broadcast(tensor, root, timeout=seconds)

        return self._calls.run(BROADCAST, job, tensors, opts, tensors)

    # ------------------------------------------------------------------ all_gather

    def all_gather(self, outputs: Any, inputs: Any, opts: Any, timeout: Timeout) -> CommWork | None:
        outputs, inputs = listed_twice(outputs), listed(inputs)
        opts = given(c10d.AllgatherOptions, opts, timeout=timeout)
        return self._calls.run(ALL_GATHER, self._all_gather_job(outputs, inputs, opts), outputs, opts, inputs)

    def all_gather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> CommWork | None:
        """Torch 2.13 gives the outputs as [rank][input]."""
        opts = given(c10d.AllgatherOptions, opts)
        by_input = [list(of_one) for of_one in zip(*outputs, strict=True)]
        job = self._all_gather_job(by_input, inputs, opts)
        return self._calls.run(ALL_GATHER_COALESCED, job, outputs, opts, inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any, timeout: Timeout) -> CommWork | None:
        opts = given(c10d.AllgatherOptions, opts, timeout=timeout)
        job = self._all_gather_single_job([output], [input], opts)
        return self._calls.run(ALL_GATHER_SINGLE, job, [output], opts, (input, output))

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> CommWork | None:
        opts = given(c10d.AllgatherOptions, opts)
        job = self._all_gather_single_job(outputs, inputs, opts)
        return self._calls.run(ALL_GATHER_SINGLE_COALESCED, job, outputs, opts, inputs)

    def _all_gather_single_job(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Callable[[], None]:
        seconds = self._calls.seconds(opts.timeout)
        check_plain("all_gather", chain(inputs, outputs))
        for output, input in zip(outputs, inputs, strict=True):
            check_shares("all_gather", output, input, self._comm.world_size)
        check_writable("all_gather", outputs)

        def job() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                self._collectives.all_gather(input, out=output, timeout=seconds)

        return job

    def _all_gather_job(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Callable[[], None]:
        """`outputs[k][r]` gets `inputs[k]` of rank r. Sizes may differ between ranks, if every rank knows them."""
        comm, seconds = self._comm, self._calls.seconds(opts.timeout)
        collectives = self._collectives
        check_plain("all_gather", chain(inputs, *outputs))
        for k, input in enumerate(inputs):
            check_writable("all_gather", outputs[k])
            if len(outputs[k]) != comm.world_size or outputs[k][comm.rank].numel() != input.numel():
                sizes = [t.numel() for t in outputs[k]]
                raise ValueError(
                    f"all_gather: rank {comm.rank} of {comm.world_size} brings {input.numel()} elements, "
                    f"outputs have {sizes}"
                )

        def job() -> None:
            for k, input in enumerate(inputs):
                sizes = [t.numel() for t in outputs[k]]
                if len(set(sizes)) == 1:
                    fill(outputs[k], collectives.all_gather(input, timeout=seconds))
                else:
                    gathered = collectives.all_gather(input.reshape(-1), counts=sizes, timeout=seconds)
                    fill(outputs[k], gathered.split(sizes))

        return job

    # ------------------------------------------------------------------ gather and scatter

    def gather(self, outputs: Any, inputs: Any, opts: Any, root: int | None, timeout: Timeout) -> CommWork | None:
        outputs, inputs = listed_twice(outputs), listed(inputs)
        opts = given(c10d.GatherOptions, opts, rootRank=root, timeout=timeout)
        root, seconds = opts.rootRank, self._calls.seconds(opts.timeout)
        check_plain("gather", chain(inputs, *outputs))
        check_root("gather", self._comm.rank, self._comm.world_size, root, outputs, "output")
        for of_one in outputs:
            check_writable("gather", of_one)

        def job() -> None:
            for k, input in enumerate(inputs):
                gathered = self._comm.gather(input, root, timeout=seconds)
                if gathered is not None:
                    fill(outputs[k], gathered)

        return self._calls.run(GATHER, job, outputs, opts, inputs)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any, timeout: Timeout) -> CommWork | None:
        """Torch 2.14's: `output` is used on the root only."""
        opts = given(c10d.GatherOptions, opts, timeout=timeout)
        root, seconds = opts.rootRank, self._calls.seconds(opts.timeout)
        out = output if self._comm.rank == root else None
        check_plain("gather", [input] if out is None else [input, out])
        if out is not None:
            check_shares("gather", out, input, self._comm.world_size)
        return self._calls.run(
            GATHER, lambda: self._comm.gather(input, root, out=out, timeout=seconds), [output], opts, (input,)
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any, root: int | None, timeout: Timeout) -> CommWork | None:
        outputs, inputs = listed(outputs), listed_twice(inputs)
        opts = given(c10d.ScatterOptions, opts, rootRank=root, timeout=timeout)
        root, seconds = opts.rootRank, self._calls.seconds(opts.timeout)
        check_plain("scatter", chain(outputs, *inputs))
        check_root("scatter", self._comm.rank, self._comm.world_size, root, inputs, "input")
        check_writable("scatter", outputs)

        def job() -> None:
            for k, output in enumerate(outputs):
                parts = torch.stack([t.detach() for t in inputs[k]]) if self._comm.rank == root else None
                self._comm.scatter(parts, root, out=output, timeout=seconds)

        return self._calls.run(SCATTER, job, outputs, opts, outputs)

    # ------------------------------------------------------------------ all_to_all

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any, timeout: Timeout) -> CommWork | None:
        opts = given(c10d.AllToAllOptions, opts, timeout=timeout)
        seconds = self._calls.seconds(opts.timeout)
        check_plain("all_to_all", chain(inputs, outputs))
        send, recv = [t.numel() for t in inputs], [t.numel() for t in outputs]
        check_writable("all_to_all", outputs)

        def job() -> None:
            packed = torch.cat([t.detach().reshape(-1) for t in inputs])
            got = torch.empty(sum(recv), dtype=outputs[0].dtype, device=outputs[0].device)
            self._collectives.all_to_all(packed, send_counts=send, recv_counts=recv, out=got, timeout=seconds)
            fill(outputs, torch.split(got, recv))

        return self._calls.run(ALL_TO_ALL, job, outputs, opts, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any,
        timeout: Timeout,
    ) -> CommWork | None:
        opts = given(c10d.AllToAllOptions, opts, timeout=timeout)
        seconds = self._calls.seconds(opts.timeout)
        check_plain("all_to_all", (input, output))
        send = splits("input", input, input_split_sizes, self._comm.world_size)
        recv = splits("output", output, output_split_sizes, self._comm.world_size)
        check_writable("all_to_all", [output])

        def job() -> None:
            self._collectives.all_to_all(input, send_counts=send, recv_counts=recv, out=output, timeout=seconds)

        return self._calls.run(ALL_TO_ALL_SINGLE, job, [output], opts, (input, output))
