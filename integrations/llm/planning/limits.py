"""What a machine can do at best: bytes per second from memory and cache, and operations per second."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

INT8_GAIN = 4  # 8-bit products that a CPU makes in the time of one f32 product, at most


def measured_limits(device: torch.device, dtype: torch.dtype) -> tuple[float, float, float]:
    """Bytes per second from memory and from the cache, and floating-point operations per second."""
    large, small = (_stream_rate(n, device) for n in (16 << 20, 64 << 10))
    side = 512
    a = torch.rand(side, side, device=device).to(dtype if device.type != "cpu" else torch.float32)
    return large, max(large, small), 2 * side**3 / _best(lambda: torch.mm(a, a), device)


def _stream_rate(n_elements: int, device: torch.device) -> float:
    matrix = torch.rand(n_elements // 1024, 1024, device=device)
    vector = torch.rand(1024, device=device)
    return 4 * n_elements / _best(lambda: torch.mv(matrix, vector), device)


def _best(run: Any, device: torch.device) -> float:
    """The shortest time of a few."""
    times = []
    for _ in range(6):
        begun = perf_counter()
        run().flatten()[:1].cpu()
        times.append(perf_counter() - begun)
    return min(times)
