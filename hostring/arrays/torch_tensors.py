"""torch tensors on any device. The core never imports torch: whoever passes a tensor has imported it."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any, Final

import numpy as np

from hostring.arrays import torch_arithmetic
from hostring.arrays.adapter import Adapter
from hostring.arrays.dtypes import BY_NAME, Array, DType
from hostring.arrays.overlaps import overlap
from hostring.arrays.pinning import pin

MAX_REMEMBERED: Final = 64  # host tensors
MAX_REMEMBERED_NBYTES: Final = 1 << 18  # of one: making a larger tensor takes no time beside the copy


class TorchAdapter(Adapter):
    """torch casts; accelerator tensors pass through pinned, reused host buffers."""

    def __init__(self) -> None:
        torch = sys.modules["torch"]
        self._torch: Any = torch
        self._strided = torch.strided
        self._numpy_of = {getattr(torch, name): dtype for name, dtype in BY_NAME.items() if hasattr(torch, name)}
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._over: dict[tuple[int, Any], tuple[Array, Any]] = {}
        torch_arithmetic.register(torch)

    def dtype(self, x: Any) -> DType:
        if x.is_nested:
            raise TypeError(
                "a nested tensor can't travel: it has no single shape; send its values() and offsets(), or unbind() it"
            )
        if x.is_meta:
            raise TypeError("a meta tensor can't travel: it holds no values; make it on a real device")
        dtype = self._numpy_of.get(x.dtype)
        if dtype is None:
            raise TypeError(f"dtype {x.dtype} can't travel; use one of {', '.join(BY_NAME)}")
        if x.layout is not self._strided:
            raise TypeError(f"a tensor of layout {x.layout} can't travel; use to_dense()")
        if hasattr(x, "to_local"):
            raise TypeError(f"a {type(x).__name__} can't travel: each rank holds a part of it; pass x.to_local()")
        if hasattr(x, "fake_mode"):
            raise TypeError(
                "a fake tensor can't travel: it holds no values; call hostring outside of the traced function"
            )
        return dtype

    def view(self, x: Any) -> Array | None:
        if not x.is_cpu or x.layout is not self._strided or not x.is_contiguous() or x.is_neg() or x.is_nested:
            return None
        if type(x) not in self._plain:
            return None
        dtype = self._numpy_of.get(x.dtype)
        if dtype is None or (dtype.kind == "c" and x.is_conj()):
            return None
        n_elements = x.numel()
        if n_elements == 0:
            return np.empty(0, dtype)
        # Several times faster than Tensor.numpy(), which has no bfloat16 either, and refuses tensors that need grad.
        memory = _block(n_elements * dtype.itemsize).from_address(x.data_ptr())
        return np.frombuffer(memory, dtype)

    def overlap(self, x: Any) -> int:
        return 0 if x.is_contiguous() else overlap(x.shape, x.stride())

    def reuse(self, x: Any, room: Array) -> None:
        if x.is_cuda:
            pin(room, self._torch.cuda.cudart())

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        return self._torch.empty(shape, dtype=x.dtype, device=x.device)

    def stage(self, x: Any, host: Array) -> None:
        self._tensor(host, x.shape).copy_(x.detach() if x.requires_grad else x)

    def unstage(self, host: Array, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        source = self._tensor(host, x.shape if shape is None else shape)
        if shape is not None:
            result = self.empty(x, shape)
            result.copy_(source)
            return result
        target = x.data
        if 0 in x.stride():  # torch refuses to write an expanded tensor: write each place once
            for dim, (stride, n) in enumerate(zip(x.stride(), x.shape, strict=True)):
                if stride == 0 and n > 1:
                    target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        target.copy_(source)
        return x

    def _tensor(self, host: Array, shape: Any) -> Any:
        """A host tensor over the memory of `host`. Small ones are remembered, and keep their memory."""
        if host.nbytes > MAX_REMEMBERED_NBYTES:
            return torch_arithmetic.tensor_over(self._torch, host).reshape(shape)
        key = (id(host), shape)
        known = self._over.get(key)
        if known is not None and known[0] is host:
            return known[1]
        if len(self._over) >= MAX_REMEMBERED:
            self._over.clear()
        tensor = torch_arithmetic.tensor_over(self._torch, host).reshape(shape)
        self._over[key] = (host, tensor)
        return tensor


@lru_cache(maxsize=256)
def _block(nbytes: int) -> Any:
    return ctypes.c_byte * nbytes
