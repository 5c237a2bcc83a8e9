"""Sparse tensors, reduced as gloo does it: each rank gathers the entries of all ranks, and adds them up."""

from __future__ import annotations

from typing import Any

import torch

import hostring


def all_reduce_sparse(comm: hostring.Comm, tensor: torch.Tensor, op: str, timeout: float | None) -> None:
    """Sum sparse COO tensors of one shape, in place. The number of entries may differ between ranks."""
    if op != "sum":
        raise ValueError(f"all_reduce: a sparse tensor can only be reduced with SUM, not {op}; call to_dense() first")
    mine = tensor.detach().coalesce()
    counts = [int(n) for n in comm.all_gather(torch.tensor([mine.indices().shape[1]]), timeout=timeout).flatten()]
    indices: Any = comm.all_gather(mine.indices().t().contiguous(), counts=counts, timeout=timeout)
    values: Any = comm.all_gather(mine.values().contiguous(), counts=counts, timeout=timeout)
    total = torch.zeros_like(mine)
    for where, what in zip(indices.split(counts), values.split(counts), strict=True):  # in the order of ranks
        total = total + torch.sparse_coo_tensor(where.t(), what, mine.shape, dtype=mine.dtype, device=mine.device)
    with (
        torch.inference_mode(tensor.is_inference()),
        torch.no_grad(),
    ):  # `data` of a sparse tensor has entries of its own
        tensor.copy_(total.coalesce())
