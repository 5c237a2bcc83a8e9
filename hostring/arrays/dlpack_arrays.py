"""Arrays of any library with DLPack: JAX, MLX, CuPy and others. They count as immutable: results are new arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hostring.arrays.adapter import Adapter
from hostring.arrays.casting import copy, fresh
from hostring.arrays.dtypes import CODES, FLOAT32, Array, DType, wire_dtype

_NO_EXCHANGE: Final = (BufferError, TypeError, RuntimeError, ValueError)  # what libraries raise for a dtype or device


class DLPackAdapter(Adapter):
    """Anything with `__dlpack__`."""

    def dtype(self, x: Any) -> DType:
        _namespace(x)
        return super().dtype(x)

    def writable(self, x: Any) -> bool:
        return False

    def stage(self, x: Any, host: Array) -> None:
        values = self._on_host(x)
        copy(host.reshape(values.shape), values)

    def unstage(self, host: Array, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        new = fresh(host, self.dtype(x), tuple(x.shape) if shape is None else shape)
        library = _namespace(x)
        if hasattr(library, "from_dlpack"):
            try:
                return library.from_dlpack(new)
            except _NO_EXCHANGE:  # numpy exports no bfloat16, for one
                pass
        return library.asarray(new)

    def _on_host(self, x: Any) -> Array:
        """The values of `x`, in its own dtype, or in float32 where its library doesn't export that dtype."""
        library = _namespace(x)
        reason: Exception | None = None
        readers: list[Callable[[Any], Array]] = [np.from_dlpack, np.asarray]
        if wire_dtype(self.dtype(x)) == FLOAT32 and hasattr(x, "astype") and hasattr(library, "float32"):
            readers.append(lambda x: np.asarray(x.astype(library.float32)))  # exact
        for read in readers:
            try:
                values = read(x)
            except _NO_EXCHANGE as exc:  # another device, or a dtype that one of the two libraries doesn't know
                reason = exc
                continue
            if values.dtype in CODES:
                return values
        kind = type(x)
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__} can't be read on the host ({reason}); register an adapter"
        ) from reason


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


def refuse_traced(x: Any) -> None:
    """Raise `TypeError` for a JAX tracer, which stands for an array while JAX traces a function and has no values."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise TypeError(
            "a JAX tracer can't travel: inside jax.jit, jax.grad or jax.vmap an array has no values yet; "
            "call hostring outside of the traced function, or through jax.pure_callback or jax.experimental.io_callback"
        )
