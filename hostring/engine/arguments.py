"""What callers may ask for: checked before a byte moves, with what to pass instead."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from hostring.arrays.dtypes import DType, check_op
from hostring.arrays.staging import ADAPTERS, adapter_for


def check_reduction(x: Any, op: str, root: Any = 0, world_size: int = 1) -> DType:
    """The dtype of `x`. Raises `TypeError` or `ValueError` where it can't be reduced by `op`, or to `root`."""
    check_rank(root, "root", world_size)
    dtype = (ADAPTERS.get(type(x)) or adapter_for(x)).dtype(x)
    check_op(op, dtype)
    return dtype


def check_rank(rank: Any, name: str, world_size: int) -> int:
    """`rank` as a plain int: a numpy integer has another `repr`, and ranks compare checksums of what was asked for."""
    number = operator.index(rank)
    if not 0 <= number < world_size:
        raise ValueError(f"{name}={rank} is no rank of this group; it has ranks 0 to {world_size - 1}")
    return number


def check_peer(rank: Any, name: str, me: int, world_size: int) -> int:
    """`rank` as a plain int, of another rank than `me`."""
    number = check_rank(rank, name, world_size)
    if number == me:
        raise ValueError(f"{name}={rank} is this rank itself")
    return number


def check_tag(tag: Any) -> int:
    """`tag` as a plain int. Raises `ValueError` for one that has no place in a header."""
    number = operator.index(tag)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"tag={tag} is not in 0 … 2**64 - 1")
    return number


def check_count(n: Any, name: str) -> int:
    """`n` as a plain int, a number of elements."""
    number = operator.index(n)
    if number < 0:
        raise ValueError(f"{name}={n} is no number of elements; pass 0 or more")
    return number


def check_out(collective: str, out: Any, n_elements: int, dtype: DType) -> None:
    """Refuse an `out` that can't take the result."""
    if out is None:
        return
    theirs = adapter_for(out).dtype(out)
    if theirs != dtype:
        raise TypeError(f"{collective}: out is {theirs}, the result is {dtype}; pass an out of that dtype")
    if math.prod(out.shape) != n_elements:
        raise ValueError(f"{collective}: out has {math.prod(out.shape)} elements, the result has {n_elements}")
    if not adapter_for(out).writable(out):
        kind = f"{type(out).__module__}.{type(out).__qualname__}"
        raise TypeError(
            f"{collective}: out can't be written, since it is a read-only or immutable {kind}; "
            "pass a writable array, or no out, and use what is returned"
        )
    check_places(collective, "out", out)


def check_places(call: str, name: str, x: Any) -> None:
    """Refuse an array with fewer places in memory than elements, where others send a value for each element."""
    if adapter_for(x).overlap(x):
        raise ValueError(
            f"{call}: elements of {name} share memory, as in an expanded tensor, and can't hold different values; "
            f"pass an array with memory of its own, such as a copy"
        )


def rows_of(x: Any, counts: Sequence[int] | None, world_size: int) -> list[int]:
    """Rows of `x` for each rank. Raises `ValueError`: `counts` don't add up, or rows don't divide evenly."""
    if not len(x.shape):
        raise TypeError("a 0-d array has no rows to divide over ranks; pass one of 1 or more dimensions")
    total = x.shape[0]
    if counts is None:
        if total % world_size:
            raise ValueError(
                f"{total} rows don't divide evenly over {world_size} ranks; say by counts how many each gets"
            )
        return [total // world_size] * world_size
    rows = [operator.index(c) for c in counts]
    if len(rows) != world_size or sum(rows) != total or min(rows) < 0:
        raise ValueError(f"counts={rows} must be {world_size} numbers that add up to {total} rows")
    return rows


def gathered(
    x: Any, counts: Sequence[int] | None, rank: int, world_size: int, root: Any = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of what is gathered from all ranks, and the elements of each rank's share."""
    check_rank(root, "root", world_size)
    adapter_for(x).dtype(x)
    if counts is None:
        return (world_size, *x.shape), (math.prod(x.shape),) * world_size
    rows = [operator.index(c) for c in counts]
    mine = x.shape[0] if len(x.shape) else None
    if len(rows) != world_size or min(rows) < 0 or mine != rows[rank]:
        brings = "a 0-d array" if mine is None else f"{mine} rows"
        raise ValueError(f"counts={rows} must name the rows of each of {world_size} ranks; rank {rank} brings {brings}")
    width = math.prod(x.shape[1:])
    return (sum(rows), *x.shape[1:]), tuple(c * width for c in rows)


def scattered(
    x: Any, root: Any, counts: Sequence[int] | None, out: Any, rank: int, world_size: int
) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """What `scatter` goes by: an array like this rank's share, its shape, and the elements of each rank's share."""
    x = x if check_rank(root, "root", world_size) == rank else None
    like = out if x is None else x
    if like is None:
        raise ValueError(
            f"scatter: root {root} must bring an array"
            if rank == root
            else f"scatter: rank {rank} is not root and must say by out= where its part goes"
        )
    adapter_for(like).dtype(like)
    ones = [1] * world_size if counts is None else counts
    rows = rows_of(like, ones, world_size) if x is not None else [operator.index(c) for c in ones]
    if len(rows) != world_size or (x is None and counts is not None and like.shape[:1] != (rows[rank],)):
        raise ValueError(f"scatter: out of rank {rank} has shape {tuple(like.shape)}, counts={rows}")
    width = math.prod(like.shape if x is None and counts is None else like.shape[1:])
    shape = tuple(like.shape) if x is None else (() if counts is None else (rows[root],)) + tuple(like.shape[1:])
    return like, shape, tuple(width * r for r in rows)


_CHECKS: Final[dict[str, Callable[..., object]]] = {
    "reduce": lambda me, n, x, root, op, _: check_reduction(x, op, root, n),
    "reduce_scatter": lambda me, n, x, op, counts, *_: (check_reduction(x, op), rows_of(x, counts, n)),
    "broadcast": lambda me, n, x, root, _: (check_rank(root, "root", n), adapter_for(x).dtype(x)),
    "all_gather": lambda me, n, x, counts, *_: gathered(x, counts, me, n),
    "gather": lambda me, n, x, root, counts, *_: gathered(x, counts, me, n, root),
    "scatter": lambda me, n, x, root, counts, out, _: scattered(x, root, counts, out, me, n),
    "all_to_all": lambda me, n, x, counts, *_: (adapter_for(x).dtype(x), rows_of(x, counts, n)),
}


def check_call(collective: str, rank: int, world_size: int, args: Sequence[Any]) -> None:
    """Raise at once what `Reductions` or `Movements` would raise for `args` when an asynchronous call has its turn."""
    check = _CHECKS.get(collective)
    if check is not None:
        check(rank, world_size, *args)
