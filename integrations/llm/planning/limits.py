"""What a machine can do at best: bytes per second from memory and cache, and operations per second."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import torch

INT8_GAIN = 4  # 8-bit products that a CPU makes in the time of one f32 product, at most


def busy_clock(device: torch.device) -> Callable[[], float]:
    """The processor's time of this process, where that says how long a rank computes: one thread, no accelerator."""
    return process_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter


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
    clock, times = busy_clock(device), []
    for _ in range(6):
        begun = clock()
        run().flatten()[:1].cpu()
        times.append(clock() - begun)
    return min(times)
