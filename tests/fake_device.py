"""A device named "fake" for torch, in Python: its memory is host memory that only copies can reach, and its work is queued on streams.

It stands in for an accelerator: a kernel that was queued has not run before its stream is waited for.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_memory: dict[int, torch.Tensor] = {}  # by storage
_library: Any = None
_HOST_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # for those that only make another view
log: list[str] = []


class Event:
    def __init__(self, stream: Stream, upto: int) -> None:
        self.stream, self.upto = stream, upto


class Stream:
    """Kernels in order. They run when somebody waits for them."""

    def __init__(self, device: Any = None) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.done = 0

    def run(self, upto: int | None = None) -> None:
        while self.done < (len(self.queue) if upto is None else upto):
            self.done += 1
            self.queue[self.done - 1]()

    def record_event(self) -> Event:
        log.append("record")
        return Event(self, len(self.queue))

    def wait_event(self, event: Event) -> None:
        log.append("wait")
        self.queue.append(lambda: event.stream.run(event.upto))

    def synchronize(self) -> None:
        log.append("synchronize")
        self.run()


_default = Stream()
_current = threading.local()


class Module:
    """What `torch.fake` offers."""

    Stream = Stream

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(_current, "stream", _default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, _current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            _current.stream = before

    def synchronize(self, device: Any = None) -> None:
        self.current_stream().synchronize()


def later(kernel: Callable[[], Any]) -> None:
    """Queue `kernel` on the current stream."""
    module.current_stream().queue.append(kernel)


def host(t: torch.Tensor) -> torch.Tensor:
    """The memory behind `t`, for kernels."""
    if t.device.type != "fake":
        return t
    return _memory[t.untyped_storage()._cdata].as_strided(t.size(), t.stride(), t.storage_offset())


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    memory = torch.zeros(max(1, math.prod(size)), dtype=dtype)
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device("fake:0"), math.prod(size) * dtype.itemsize)
    strides = [math.prod(max(1, n) for n in size[k + 1 :]) for k in range(len(size))]
    empty = torch._C._acc.create_empty_tensor([0], dtype)
    _memory[storage._cdata] = memory
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_HOST_KERNELS, empty, storage, 0, list(size), strides)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    module.current_stream().run()  # a copy from or to pageable memory waits for its stream
    host(target).copy_(host(source))
    return target


def _cat(tensors: Any, dim: int = 0) -> torch.Tensor:
    module.current_stream().run()
    joined = torch.cat([host(t) for t in tensors], dim)
    return _empty(joined.shape, dtype=joined.dtype).copy_(joined)


def _as_strided(t: torch.Tensor, size: Any, stride: Any, offset: Any = None) -> torch.Tensor:
    return torch.ops.aten.as_strided.default.redispatch(_HOST_KERNELS, t, size, stride, offset)


def _view(t: torch.Tensor, size: Any) -> torch.Tensor:
    return torch.ops.aten.view.default.redispatch(_HOST_KERNELS, t, size)


def _scaled(t: torch.Tensor, factor: Any) -> torch.Tensor:
    later(lambda: host(t).mul_(factor))
    return t


module = Module()


def install() -> None:
    """Give this process the device. It stays its accelerator."""
    global _library
    if _library is not None:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("fake", backend_module=module)
    _library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Any] = {
        "empty.memory_format": _empty,
        "empty_strided": lambda size, stride, **kwargs: _empty(size, **kwargs),
        "_copy_from": _copy_from,
        "cat": _cat,
        "_local_scalar_dense": lambda t: t.cpu().item(),
        "as_strided": _as_strided,
        "view": _view,
        "mul_.Tensor": lambda t, other: _scaled(t, other),
        "mul_.Scalar": _scaled,
    }
    for name, kernel in kernels.items():
        _library.impl(name, kernel, "PrivateUse1")
