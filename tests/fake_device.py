"""A device named "fake" for torch, in Python. Only copies reach its memory, and its kernels are queued on streams.

It stands in for an accelerator: a queued kernel runs only when its stream is waited for, operators refuse host tensors
beside its own, and `.numpy()` does not work. Most operators borrow the host's kernels.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_memory: dict[int, torch.Tensor] = {}  # by storage
_libraries: list[Any] = []
_HOST_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # for those that only make another view
log: list[str] = []
copied_to_host: list[torch.Size] = []  # each waits for the device
wide_products = False  # whether 16-bit matrices can be multiplied into f32 sums, as on CUDA


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
    memory = _memory[t.untyped_storage()._cdata]
    if memory.dtype != t.dtype:
        memory = memory.view(t.dtype)
    return memory.as_strided(t.size(), t.stride(), t.storage_offset())


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    memory = torch.zeros(max(1, math.prod(size)), dtype=dtype)
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device("fake:0"), math.prod(size) * dtype.itemsize
    )
    _memory[storage._cdata] = memory
    return _set(torch._C._acc.create_empty_tensor([0], dtype), storage, size)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    module.current_stream().run()  # a copy from or to pageable memory waits for its stream
    if target.is_cpu:
        copied_to_host.append(source.shape)
    host(target).copy_(host(source))
    return target


def _as_strided(t: torch.Tensor, size: Any, stride: Any, offset: Any = None) -> torch.Tensor:
    return torch.ops.aten.as_strided.default.redispatch(_HOST_KERNELS, t, size, stride, offset)


def _view(t: torch.Tensor, size: Any) -> torch.Tensor:
    return torch.ops.aten.view.default.redispatch(_HOST_KERNELS, t, size)


def _mm_wide(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if not wide_products:
        raise NotImplementedError("no such kernel")
    module.current_stream().run()
    return _to_device(host(a).to(out_dtype) @ host(b).to(out_dtype))


def _to_device(values: torch.Tensor) -> torch.Tensor:
    there = _empty(values.shape, dtype=values.dtype)
    host(there).copy_(values)
    return there


def _borrowed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any other operator: the host's kernel on the tensors' memory. In-place results and views keep that memory."""
    _refuse_mixed(op, args)
    module.current_stream().run()
    behind: dict[
        int, tuple[torch.Tensor, torch.Tensor]
    ] = {}  # by id of the host's: it, which keeps the id, and the one it stands for

    def to_host(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, torch.Tensor) or x.device.type != "fake":
            return x
        memory = host(x)
        behind[id(memory)] = memory, x
        return memory

    def to_device(y: Any) -> Any:
        if not isinstance(y, torch.Tensor):
            return y
        if id(y) in behind:
            return behind[id(y)][1]
        for memory, x in behind.values():
            if y.numel() and y.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                return _as_strided(x, y.size(), y.stride(), y.storage_offset())
        return _to_device(y)

    result = op(*_each(to_host, args), **{name: to_host(value) for name, value in kwargs.items()})
    for memory, x in behind.values():
        if memory.shape != x.shape:  # an empty `out`, which the kernel has given its size
            _set(x, _to_device(memory).untyped_storage(), memory.shape)
    return _each(to_device, result)


def _each(fn: Callable[[Any], Any], x: Any) -> Any:
    return type(x)(_each(fn, y) for y in x) if type(x) in (list, tuple) else fn(x)


def _refuse_mixed(op: Any, args: Any) -> None:
    """As on CUDA: a scalar of the host may meet one tensor, or be one of the choices of `where`; nothing else may."""
    tensors: list[torch.Tensor] = []
    _each(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None, args)
    scalars_may = len(tensors) == 2 or op.name().startswith("aten::where")
    strange = [x for x in tensors if x.is_cpu and (x.dim() or not scalars_may)]
    if strange and len(strange) < len(tensors):
        raise RuntimeError(f"{op.name()}: expected all tensors to be on the same device, but found fake:0 and cpu")


def _set(t: torch.Tensor, storage: Any, size: Any) -> torch.Tensor:
    strides = [math.prod(max(1, n) for n in size[k + 1 :]) for k in range(len(size))]
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        _HOST_KERNELS, t, storage, 0, list(size), strides
    )


def _scaled(t: torch.Tensor, factor: Any) -> torch.Tensor:
    later(lambda: host(t).mul_(factor))
    return t


module = Module()


def install() -> None:
    """Give this process the device. It stays its accelerator."""
    if _libraries:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("fake", backend_module=module)
    aten, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _libraries.extend((aten, everything))
    kernels: dict[str, Any] = {
        "empty.memory_format": _empty,
        "empty_strided": lambda size, stride, **kwargs: _empty(size, **kwargs),
        "_copy_from": _copy_from,
        "_local_scalar_dense": lambda t: t.cpu().item(),
        "as_strided": _as_strided,
        "view": _view,
        "mul_.Tensor": lambda t, other: _scaled(t, other),
        "mul_.Scalar": _scaled,
        "mm.dtype": _mm_wide,
    }
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "PrivateUse1")
    everything.fallback(_borrowed, "PrivateUse1")
