"""Checks of a call's tensors before anything is sent, and the copy from one buffer into a list of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def listed(x: Any) -> Any:
    """The second form of a method takes one tensor where the first takes a list."""
    return x if isinstance(x, (list, tuple)) else [x]


def listed_twice(x: Any) -> Any:
    """The same for a list of tensors where the first form takes a list of lists."""
    return x if not x or isinstance(x[0], (list, tuple)) else [x]


def check_plain(what: str, tensors: Iterable[Tensor], *, sparse: bool = False) -> None:
    """Raise `TypeError` for a tensor that has no values, or more than one shape.

    Args:
        sparse: whether sparse COO tensors will do.
    """
    for tensor in tensors:
        layout = tensor.layout
        if tensor.is_nested:
            raise TypeError(f"{what}: a nested tensor can't travel, since it has no single shape; unbind() it")
        if tensor.is_meta:
            raise TypeError(f"{what}: a meta tensor can't travel, since it holds no values; make it on a real device")
        if layout is not torch.strided and not (sparse and layout is torch.sparse_coo):
            raise TypeError(f"{what}: a tensor of layout {layout} can't travel; use to_dense()")


def check_shares(what: str, whole: Tensor, share: Tensor, world_size: int) -> None:
    """Raise unless `whole` consists of one `share` for each rank."""
    if whole.numel() != share.numel() * world_size:
        raise ValueError(
            f"{what}: the whole has {whole.numel()} elements, a rank's share {share.numel()}; "
            f"it must be {world_size} shares"
        )
    if whole.dtype != share.dtype:
        raise TypeError(f"{what}: the whole is {whole.dtype}, a rank's share {share.dtype}; they must be the same")


def check_root(what: str, rank: int, world_size: int, root: int, lists: list[list[Tensor]], name: str) -> None:
    """Raise unless the root gives one tensor for each rank, and the others give none."""
    if rank == root and (not lists or any(len(of_one) != world_size for of_one in lists)):
        raise ValueError(f"{what}: root {root} must give {world_size} {name} tensors, one for each rank")
    if rank != root and any(lists):
        raise ValueError(f"{what}: only root {root} gives {name} tensors, rank {rank} gave some too")


def splits(name: str, tensor: Tensor, sizes: Sequence[int], world_size: int) -> list[int]:
    """The rows of `tensor` for each rank in an all_to_all."""
    if tensor.dim() == 0:
        raise TypeError(
            f"all_to_all: {name} is a 0-d tensor, which has no rows to divide; pass one of 1 or more dimensions"
        )
    rows = tensor.shape[0]
    if not sizes:
        if rows % world_size:
            raise ValueError(
                f"all_to_all: {rows} rows of {name} don't divide evenly over {world_size} ranks; "
                f"give {name}_split_sizes"
            )
        return [rows // world_size] * world_size
    if len(sizes) != world_size or sum(sizes) != rows:
        raise ValueError(
            f"all_to_all: {name}_split_sizes={list(sizes)} must be {world_size} numbers that add up to {rows} rows"
        )
    return list(sizes)


def check_writable(what: str, outputs: Sequence[Tensor]) -> None:
    """Raise where an output can't hold a result: an expanded tensor has fewer places in memory than elements."""
    for output in outputs:
        if any(stride == 0 and n > 1 for stride, n in zip(output.stride(), output.shape, strict=True)):
            raise ValueError(
                f"{what}: elements of an output of shape {tuple(output.shape)} share memory, since it is expanded, "
                f"and can't hold different values; pass a tensor with memory of its own"
            )


def fill(outputs: Sequence[Tensor], parts: Any) -> None:
    """Copy `parts` into `outputs`."""
    # through `data`: outputs may need grad, and this thread's grad mode isn't the caller's
    for output, part in zip(outputs, parts, strict=True):
        output.data.copy_(part.view(output.shape) if part.shape != output.shape else part)
