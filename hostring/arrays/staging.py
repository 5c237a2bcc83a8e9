"""The adapter for an array: numpy's, torch's, DLPack's for other libraries, or one given to `register_adapter`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hostring.arrays.adapter import Adapter
from hostring.arrays.dlpack_arrays import DLPackAdapter, refuse_traced
from hostring.arrays.numpy_arrays import NumpyAdapter, refuse_masked
from hostring.arrays.torch_tensors import TorchAdapter

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
    refuse_masked(x)
    refuse_traced(x)
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
    raise TypeError(
        f"{kind.__module__}.{kind.__qualname__} is not an array that hostring can stage; pass a numpy array, "
        "a torch tensor, an array with __dlpack__, or register an adapter"
    )
