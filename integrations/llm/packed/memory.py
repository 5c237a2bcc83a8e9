"""Memory that ggml and numpy share: tensors over numpy arrays and over a mapped file, and their lifetime."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hostring.integrations.llm.packed.library import Ggml, Pointer

ALIGN = 64  # ggml asks for 32
F32, F16, I32, I64 = 0, 1, 26, 27  # ggml's numbers of the element types of activations


class Arena:
    """Owns contexts and buffers of one library, and the arrays under them; gives them up when it is collected."""

    def __init__(self, ggml: Ggml) -> None:
        self.ggml = ggml
        self._kept: list[Any] = []
        self._freed: list[tuple[Any, Pointer]] = []
        weakref.finalize(self, _free_all, self._freed)

    def context(self, n_tensors: int, n_graphs: int = 0, graph_nodes: int = 0) -> Pointer:
        """See `Ggml.context`."""
        context = self.ggml.context(n_tensors, n_graphs, graph_nodes)
        self._freed.append((self.ggml.free, context))
        return context

    def own(self, free: Any, pointer: Pointer) -> Pointer:
        """Give `pointer` up with `free`, in the reverse order of coming."""
        self._freed.append((free, pointer))
        return pointer

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """A zeroed array that ggml can use: aligned, and alive as long as the arena."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raw = np.zeros(nbytes + ALIGN, np.uint8)
        skip = -raw.ctypes.data % ALIGN
        self._kept.append(raw)
        return raw[skip : skip + nbytes].view(dtype).reshape(shape)

    def keep(self, what: Any) -> None:
        """Keep `what` alive as long as the arena."""
        self._kept.append(what)

    def buffer(self, address: int, nbytes: int) -> Pointer:
        """A buffer over memory that something else owns, which must live as long as the arena."""
        ggml = self.ggml
        return self.own(ggml.backend_buffer_free, ggml.backend_cpu_buffer_from_ptr(address, max(nbytes, ALIGN)))

    def place(self, tensor: Pointer, array: npt.NDArray[Any]) -> Pointer:
        """Let `tensor` have its data in `array`, a part of an array of this arena. Returns the tensor."""
        return self.place_at(tensor, self.buffer(array.ctypes.data, array.nbytes), array.ctypes.data)

    def place_at(self, tensor: Pointer, buffer: Pointer, address: int) -> Pointer:
        """The same for an address inside a buffer."""
        if self.ggml.backend_tensor_alloc(buffer, tensor, address) != 0:
            raise MemoryError("ggml could not place a tensor")
        return tensor


def _free_all(pairs: list[tuple[Any, Pointer]]) -> None:
    while pairs:
        free, pointer = pairs.pop()
        free(pointer)
