"""Between the caller's arrays and flat host arrays: one adapter per kind of array.

An adapter needs two methods: to the wire, and from the wire. numpy and torch are built in; whatever speaks DLPack
(JAX, MLX, CuPy) comes through that; `register_adapter` takes the rest.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np

from hostring.arrays.casting import copy, fresh, register_cast
from hostring.arrays.dtypes import BFLOAT16, BY_NAME, CODES, DTYPES, FLOAT16, FLOAT32, Array, DType, name_of
from hostring.arrays.fold import register_narrow_sum
from hostring.arrays.pinning import pin

_MOST_REMEMBERED: Final = 64
_REMEMBERED_NBYTES: Final = 1 << 18  # above, making a tensor is nothing beside the copy


class Adapter:
    """How arrays of one type travel. Subclass it, give it the two methods, and pass it to `register_adapter`."""

    def to_wire(self, x: Any, wire: Array) -> None:
        """Copy all elements of `x`, in C order, into the flat host array `wire`, casting to its dtype."""
        raise NotImplementedError

    def from_wire(self, wire: Array, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        """Bring `wire` back, rounding to nearest even into the dtype of `x`.

        Args:
            shape: None: into `x` itself, which is returned, or into a new array where `x` can't be changed.
                Otherwise a new array of this shape, of the dtype and on the device of `x`.
        """
        raise NotImplementedError

    def reuse(self, x: Any, room: Array) -> None:
        """Called before `x` is staged in `room`, which later calls use as well: prepare it, when that is worth while."""

    def view(self, x: Any) -> Array | None:
        """The memory of `x` as a flat, writable host array in its own dtype, when it is one; else None."""
        return None

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        """A new array of `shape`, of the dtype and on the device of `x`, or None where results are made by `from_wire`."""
        return None

    def dtype(self, x: Any) -> DType:
        """The numpy (or ml_dtypes) dtype that holds the elements of `x`."""
        name = str(x.dtype).rpartition(".")[2]
        if name not in BY_NAME:
            raise TypeError(f"dtype {x.dtype} can't travel; use one of {', '.join(BY_NAME)}")
        return BY_NAME[name]


class NumpyAdapter(Adapter):
    def view(self, x: Array) -> Array | None:
        if not x.flags.carray or not x.dtype.isnative:
            return None
        return x if x.ndim == 1 else x.ravel()

    def empty(self, x: Array, shape: tuple[int, ...]) -> Array:
        return np.empty(shape, self.dtype(x))

    def dtype(self, x: Array) -> DType:
        code = CODES.get(x.dtype)
        return BY_NAME[name_of(x.dtype.newbyteorder("="))] if code is None else DTYPES[code]

    def to_wire(self, x: Array, wire: Array) -> None:
        copy(wire.reshape(x.shape), x)

    def from_wire(self, wire: Array, x: Array, shape: tuple[int, ...] | None = None) -> Array:
        if shape is not None:
            return fresh(wire, self.dtype(x), shape)
        if isinstance(x, np.ndarray) and x.flags.writeable:
            copy(x, wire.reshape(x.shape))
            return x
        new = fresh(wire, x.dtype, x.shape)
        return new if isinstance(x, np.ndarray) else new[()]


class TorchAdapter(Adapter):
    """torch tensors of any device. torch casts; accelerator tensors pass through pinned, reused host buffers."""

    def __init__(self) -> None:
        torch = sys.modules["torch"]
        self._torch: Any = torch
        self._numpy_of = {getattr(torch, name): dtype for name, dtype in BY_NAME.items() if hasattr(torch, name)}
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._over: dict[tuple[int, Any], tuple[Array, Any]] = {}
        for source, target in ((FLOAT16, FLOAT32), (FLOAT32, FLOAT16), (FLOAT32, BFLOAT16)):
            register_cast(source, target, self._bind_cast)  # numpy itself widens bfloat16 faster
        for dtype, kind in ((FLOAT16, torch.float16), (BFLOAT16, torch.bfloat16)):
            if self._adds_as_float32(kind):
                register_narrow_sum(dtype, partial(self._bind_add, kind, int(np.array(np.nan, dtype).view(np.int16))))

    def dtype(self, x: Any) -> DType:
        dtype = self._numpy_of.get(x.dtype)
        if dtype is None:
            raise TypeError(f"dtype {x.dtype} can't travel; use one of {', '.join(BY_NAME)}")
        if x.layout is not self._torch.strided:
            raise TypeError(f"a tensor of layout {x.layout} can't travel; use to_dense()")
        return dtype

    def view(self, x: Any) -> Array | None:
        if not x.is_cpu or not x.is_contiguous() or type(x) not in self._plain or x.is_neg():
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

    def reuse(self, x: Any, room: Array) -> None:
        if x.is_cuda:
            pin(room, self._torch.cuda.cudart())

    def empty(self, x: Any, shape: tuple[int, ...]) -> Any:
        return self._torch.empty(shape, dtype=x.dtype, device=x.device)

    def to_wire(self, x: Any, wire: Array) -> None:
        self._tensor(wire, x.shape).copy_(x.detach() if x.requires_grad else x)

    def from_wire(self, wire: Array, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        if shape is None:
            x.data.copy_(self._tensor(wire, x.shape))
            return x
        result = self.empty(x, shape)
        result.copy_(self._tensor(wire, shape))
        return result

    def _tensor(self, wire: Array, shape: Any) -> Any:
        """A host tensor over the memory of `wire`, remembered, and the memory with it, when it is small enough to matter."""
        if wire.nbytes > _REMEMBERED_NBYTES:
            return self._flat(wire).reshape(shape)
        key = (id(wire), shape)
        known = self._over.get(key)
        if known is not None and known[0] is wire:
            return known[1]
        if len(self._over) >= _MOST_REMEMBERED:
            self._over.clear()
        tensor = self._flat(wire).reshape(shape)
        self._over[key] = (wire, tensor)
        return tensor

    def _bind_add(self, dtype: Any, nan: int, other: Array) -> Callable[[Array], None]:
        """A narrow sum in torch's `dtype`, whose plain NaN has the bits `nan`: see `register_narrow_sum`."""
        frombuffer, int16 = self._torch.frombuffer, self._torch.int16
        theirs = frombuffer(other, dtype=dtype) if other.size else None

        def add(total: Array) -> None:
            if theirs is None:
                return
            sums = frombuffer(total, dtype=dtype)
            largest = sums.add_(theirs).max().item()
            if largest != largest:  # a NaN counts as the largest
                sums.view(int16)[sums.isnan()] = nan

        return add

    def _adds_as_float32(self, dtype: Any) -> bool:
        """Whether torch adds as a narrow sum must: a processor's own 16-bit instructions may flush subnormal numbers to zero."""
        torch, small = self._torch, np.arange(1 << 9, dtype=np.int16)
        every = np.arange(-1 << 15, 1 << 15, 1 << 6, dtype=np.int16)
        left = torch.from_numpy(np.concatenate((every, small, small))).view(dtype)
        right = torch.from_numpy(np.concatenate((every[::-1], small[::-1], small[::-1] | np.int16(-1 << 15)))).view(
            dtype
        )
        wide = (left.float() + right.float()).to(dtype)
        return bool(torch.equal((left + right).nan_to_num(0).view(torch.int16), wide.nan_to_num(0).view(torch.int16)))

    def _flat(self, wire: Array) -> Any:
        if (
            self._torch.is_inference_mode_enabled()
        ):  # a tensor that is made there can't be written outside, and this one is kept
            with self._torch.inference_mode(False):
                return self._flat(wire)
        if wire.dtype.isbuiltin == 1:
            return self._torch.from_numpy(wire)
        return self._torch.from_numpy(wire.view(f"i{wire.itemsize}")).view(getattr(self._torch, wire.dtype.name))

    def _bind_cast(self, target: Array, source: Array) -> Callable[[], Any]:
        return partial(self._flat(target).copy_, self._flat(source))


@lru_cache(maxsize=256)
def _block(nbytes: int) -> Any:
    return ctypes.c_byte * nbytes


class DLPackAdapter(Adapter):
    """Anything with `__dlpack__`. Such arrays are taken as immutable: results are new arrays of the same library."""

    def dtype(self, x: Any) -> DType:
        _namespace(x)
        return super().dtype(x)

    def to_wire(self, x: Any, wire: Array) -> None:
        host = _on_host(x)
        copy(wire.reshape(host.shape), host)

    def from_wire(self, wire: Array, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        new = fresh(wire, self.dtype(x), tuple(x.shape) if shape is None else shape)
        library = _namespace(x)
        if hasattr(library, "from_dlpack"):
            try:
                return library.from_dlpack(new)
            except (BufferError, TypeError, RuntimeError, ValueError):  # numpy exports no bfloat16, for one
                pass
        return library.asarray(new)


def _namespace(x: Any) -> Any:
    """The library that makes arrays like `x`. Raises `TypeError` where none is found, before a byte moves."""
    library = (
        x.__array_namespace__()
        if hasattr(x, "__array_namespace__")
        else sys.modules.get(type(x).__module__.partition(".")[0])
    )
    if not hasattr(library, "from_dlpack") and not hasattr(library, "asarray"):
        kind = type(x)
        why = "has __dlpack__, but neither __array_namespace__ nor a module that makes such arrays"
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} {why}; register an adapter")
    return library


def _on_host(x: Any) -> Array:
    try:
        return np.from_dlpack(x)
    except (BufferError, TypeError, RuntimeError, ValueError):  # another device, or a dtype that numpy doesn't import
        if not hasattr(x, "__array__"):
            raise TypeError(f"{type(x).__qualname__} can't be read on the host; register an adapter") from None
        return np.asarray(x)


ADAPTERS: dict[type, Adapter] = {np.ndarray: NumpyAdapter()}


def register_adapter(kind: type, adapter: Adapter) -> None:
    """Let arrays of type `kind` (and its subclasses) travel through `adapter`."""
    ADAPTERS[kind] = adapter


def adapter_for(x: Any) -> Adapter:
    """The adapter for `x`, remembered by its type.

    Raises:
        TypeError: `x` is no array that hostring knows how to stage.
    """
    kind = type(x)
    found = ADAPTERS.get(kind)
    if found is None:
        found = ADAPTERS[kind] = _find(x, kind)
    return found


def _find(x: Any, kind: type) -> Adapter:
    for base in kind.__mro__[1:]:
        if base in ADAPTERS:
            return ADAPTERS[base]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return TorchAdapter()
    if isinstance(x, np.generic):
        return NumpyAdapter()
    if hasattr(x, "__dlpack__"):
        return DLPackAdapter()
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not an array that hostring can stage; pass a numpy array, a torch tensor, "
                    "an array with __dlpack__, or register an adapter")  # fmt: skip
