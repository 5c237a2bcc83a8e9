"""Accelerators queue kernels. A call waits for the kernels queued before it, and leaves none of its copies queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

_side = threading.local()


def in_order(job: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """`job` for another thread. Its copies wait for what this thread's stream holds now, not for later kernels."""
    device = next((t.device for t in tensors if t.device.type != "cpu"), None)
    if device is None:
        return job
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "current_stream") or not hasattr(module, "stream"):
        synchronize(device)
        return job
    before = module.current_stream(device).record_event()

    def on_side_stream() -> Any:
        stream = _side_stream(module, device)
        with module.stream(stream):
            stream.wait_event(before)
            result = job()
            stream.synchronize()
        return result

    return on_side_stream


def synchronize(device: torch.device) -> None:
    """Wait for the kernels of `device`, if it queues any."""
    wait = getattr(torch.get_device_module(device), "synchronize", None)
    if wait is not None:
        wait()


def _side_stream(module: Any, device: torch.device) -> Any:
    """A stream of this thread for its copies."""
    streams = _side.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = module.Stream(device)
    return streams[device]
