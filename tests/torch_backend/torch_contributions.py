"""What ranks bring to collectives of torch, and its fold."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def contribution(rank: int, n: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, different on every rank and at every place: exact in every dtype."""
    values = torch.tensor([(3 * rank + 5 * k) % 4 + 1 for k in range(n)])
    return values.to(dtype)


def fold(op: str, rows: list[torch.Tensor]) -> torch.Tensor:
    """In rank order. Floats of 32 bits or less are folded in float32, then rounded once."""
    wide = [r.float() if r.dtype in (torch.float16, torch.bfloat16) else r for r in rows]
    steps = {
        "sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }  # fmt: skip
    total = wide[0]
    for row in wide[1:]:
        total = steps[op](total, row)
    return (total / len(rows) if op == "avg" else total).to(rows[0].dtype)


def total(n: int) -> float:
    return float(sum(range(1, n + 1)))
