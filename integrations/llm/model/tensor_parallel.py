"""Tensor parallelism, applied to `Decoder` from outside.

A sub-layer is a column-parallel matrix, head-local or column-local work, and a row-parallel matrix: each rank applies
its own slice of the output projection, so nothing but one hidden-state-sized partial sum crosses the wire. It does so
in f32, twice per layer, and the sum has the same bits on every rank, whatever dtype a rank computes in.

Layers after Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hostring import Comm
from hostring.integrations.llm.model.audit import Clock, StreamAudit
from hostring.integrations.llm.model.devices import sums_wide
from hostring.integrations.llm.model.qwen import linear
from hostring.integrations.llm.model.shards import ShardPlan

Call = Callable[[], object]


class Summing(Protocol):
    """What the reducer needs of a group."""

    def all_reduce(self, x: Any, /) -> Any: ...


class HiddenReducer:
    """Adds up the ranks' partial hidden states in f32.

    On a CPU, decoding always passes its single row through the same buffer, so that the group prepares its messages
    once. What lies on another device is staged by the group.

    Attributes:
        comm: the group.
        audit: notes the sums, when there is one.
        clock: runs while this rank computes, and stands still here.
    """

    def __init__(self, comm: Summing, hidden_size: int, audit: StreamAudit | None = None) -> None:
        self.comm = comm
        self.audit = audit
        self.clock = Clock()
        self.row = torch.empty(1, hidden_size)
        self._row_array = self.row.numpy()

    def __call__(self, partial: Tensor) -> Tensor:
        """Sum over ranks, in place. partial: (..., hidden), f32, contiguous."""
        self.clock.stop()
        self.comm.all_reduce(partial.numpy() if partial.is_cpu else partial)
        if self.audit is not None:
            self.audit.add(partial)
        self.clock.start()
        return partial

    def reduce_array(self, partial: npt.NDArray[np.float32], total: Callable[[], npt.NDArray[np.float32]]) -> None:
        """Sum a contiguous numpy array over ranks, in place. `total` makes one hidden state for each row of it, for
        the audit."""
        self.clock.stop()
        self.comm.all_reduce(partial)
        if self.audit is not None:
            self.audit.add(torch.from_numpy(total()))
        self.clock.start()

    def reduce_row(self) -> Tensor:
        """Sum `row` over ranks, in place."""
        self.clock.stop()
        self.comm.all_reduce(self._row_array)
        if self.audit is not None:
            self.audit.add(self.row)
        self.clock.start()
        return self.row


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _streamed(weight: Tensor) -> Tensor:
    """The same matrix, laid out the way that one row is multiplied fastest.

    In f32 on a CPU, column by column: the product of one row with it then reads memory strictly forward, which is worth
    15 to 20 % when the weights don't fit the cache. 16-bit kernels want rows.
    """
    return weight.t().contiguous().t() if weight.is_cpu and weight.dtype == torch.float32 else weight.contiguous()


def _one_thread() -> bool:
    """Whether torch and numpy's BLAS both compute on one thread. numpy can't tell; this is what OpenBLAS goes by when
    it is loaded."""
    told = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return torch.get_num_threads() == 1 and (told == "1" if told else cores == 1)


def product(x: Tensor, columns: Tensor, y: Tensor) -> Call:
    """A call that writes x times `columns` into y, all f32. x: (1, inputs); columns: (inputs, outputs)."""
    # One thread reads a streamed matrix 10 to 35 % faster in numpy. With more threads, numpy's idle ones spin on the
    # cores that torch's need, and the other way round: decoding with two was 7 times slower.
    if _one_thread():
        return partial(np.dot, x.numpy()[0], columns.numpy(), out=y.numpy()[0])
    return partial(torch.mm, x, columns, out=y)


def _bound(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> list[Call]:
    """Calls that write x Wᵀ + b into y, all f32."""
    multiply = product(x, weight.detach().t(), y)
    if bias is None:
        return [multiply]
    total = y.numpy()[0]
    return [multiply, partial(np.add, total, bias.detach().numpy(), out=total)]


class ColumnParallelLinear(nn.Module):
    """This rank's output columns of y = x Wᵀ + b. The input is whole and the same on every rank.

    Args:
        weight: this rank's rows, shape (local outputs, inputs), on the device that is to multiply.
        bias: its part, shape (local outputs,), on the same.
        dtype: what this rank computes in.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _frozen(_streamed(weight.to(dtype)))
        self.bias = None if bias is None else _frozen(bias.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)  # (..., local outputs)

    def bind(self, x: Tensor, y: Tensor, rounded: Tensor) -> list[Call]:
        """Calls that write `forward(x)` of one row into y.

        Args:
            x: (1, inputs), f32. y: (1, local outputs), in the dtype of the weights.
            rounded: scratch for x in that dtype.
        """
        if y.dtype == torch.float32:
            return _bound(x, self.weight, self.bias, y)
        columns, bias = self.weight.detach().t(), self.bias
        multiply = torch.mm if bias is None else partial(torch.addmm, bias.detach())
        return [partial(rounded.copy_, x), partial(multiply, rounded, columns, out=y)]


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b where each rank holds some of the inputs: one partial sum per rank, one reduction.

    Inputs and weights are rounded to the rank's dtype, products are summed in f32: a partial sum in f16 would overflow
    in models with large activations. CPUs have no such kernel, nor have all accelerators; there the rounded weights are
    kept widened.

    Args:
        weight: this rank's columns, shape (outputs, local inputs), on the device that is to multiply.
        bias: on one rank only; it enters the sum once.
        dtype: what this rank computes in.
        reducer: sums over the ranks; None where the caller adds several of these up before.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, reducer: HiddenReducer | None) -> None:
        super().__init__()
        self.dtype = dtype
        rounded = weight.to(dtype)
        self.weight = _frozen(_streamed(rounded if sums_wide(rounded.device, dtype) else rounded.float()))
        self.bias = None if bias is None else _frozen(bias.float())
        self.reducer = reducer

    def forward(self, x: Tensor) -> Tensor:
        total = self._partial(x)  # (..., outputs)
        return total if self.reducer is None else self.reducer(total)

    def _partial(self, x: Tensor) -> Tensor:
        if self.weight.dtype != torch.float32:
            return self._summed_wide(x.to(self.dtype))
        if self.dtype != torch.float32:
            x = x.to(self.dtype).float()
        return F.linear(x, self.weight, self.bias)

    def _summed_wide(self, x: Tensor) -> Tensor:
        """x Wᵀ + b in f32, of 16-bit x and W, shape (..., outputs)."""
        sums = torch.mm(x.flatten(0, -2), self.weight.t(), out_dtype=torch.float32)
        if self.bias is not None:
            sums += self.bias
        return sums.view(*x.shape[:-1], -1)

    def bind(self, x: Tensor, y: Tensor) -> list[Call]:
        """Calls that write this rank's partial sum of one row into y. x: (1, inputs), f32 values rounded to the dtype.
        y: (1, outputs), f32."""
        return _bound(x, self.weight, self.bias, y)


class VocabParallelEmbedding(nn.Module):
    """Token ids to f32 rows where each rank holds some of the rows: one more reduction, less memory.

    Args:
        weight: this rank's rows, shape (local rows, hidden), on the device that is to look them up.
        first: id of the first of them.
        reducer: sums over the ranks; all but one contribute zeros.
    """

    def __init__(self, weight: Tensor, first: int, reducer: HiddenReducer) -> None:
        super().__init__()
        self.weight = _frozen(weight)
        self.first = first
        self.reducer = reducer

    def forward(self, tokens: Tensor) -> Tensor:
        n_rows, width = self.weight.shape
        if n_rows == 0:
            return self.reducer(torch.zeros(*tokens.shape, width, device=self.weight.device))
        local = tokens - self.first
        # All of them, and not only those that are here: an accelerator would have to say how many those are first.
        nearest = local.clamp(0, n_rows - 1)
        rows = F.embedding(nearest, self.weight).float()  # (batch, seq, hidden)
        return self.reducer(torch.where((local == nearest).unsqueeze(-1), rows, 0.0))


class ParallelHead(ColumnParallelLinear):
    """This rank's part of the vocabulary: logits of ids `first` … `first` + local rows − 1."""  # noqa: RUF002

    def __init__(self, weight: Tensor, first: int, dtype: torch.dtype) -> None:
        super().__init__(weight, None, dtype)
        self.first = first


def gather_logits(comm: Comm, local: Tensor, plan: ShardPlan, root: int = 0) -> npt.NDArray[np.float32] | None:
    """The logits of the whole vocabulary at `root`, for tests and for scoring; None elsewhere.

    Args:
        local: shape (..., local vocabulary), f32.

    Returns:
        shape (..., vocabulary).
    """
    padded = np.full((*local.shape[:-1], max(plan.vocab)), -np.inf, np.float32)
    padded[..., : local.shape[-1]] = local.cpu().numpy()
    stacked = comm.gather(padded, root=root)
    if stacked is None:
        return None
    return np.concatenate([stacked[r][..., :n] for r, n in enumerate(plan.vocab)], axis=-1)
