"""Matrices in the layout that ggml's fastest kernels read: blocks of eight rows interleaved, as llama.cpp holds them.

The numbers are the file's; only their places in memory differ. So such a matrix is a copy, no view of the mapped file.
Each element of a product depends on its own row alone, and not on which rows are beside it in the shard.
"""

from __future__ import annotations

import ctypes as C
from typing import Final

import numpy as np
import numpy.typing as npt

from hostring.integrations.llm.packed.library import Ggml, Pointer
from hostring.integrations.llm.packed.memory import F32, I32, Arena

ROWS_STEP: Final = 8  # rows that are interleaved, at most: a matrix needs a multiple of them
_LAYOUT: Final = b"CPU_REPACK"  # ggml's name of it; others (AMX) were not tried
_EXTRA_TYPES: Final = b"ggml_backend_dev_get_extra_bufts"


class Repacker:
    """Lays matrices out for those kernels. What this CPU has none for stays as it is in the file."""

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        registry = ggml.backend_cpu_reg()
        self._device = ggml.backend_reg_dev_get(registry, 0)
        self._type = self._find(registry)

    def _find(self, registry: Pointer) -> Pointer | None:
        """The buffer type whose tensors are laid out so; None where ggml was built without it."""
        address = self._ggml.backend_reg_get_proc_address(registry, _EXTRA_TYPES)
        if not address:
            return None
        types = C.CFUNCTYPE(C.POINTER(C.c_void_p), C.c_void_p)(address)(self._device)
        n = 0
        while types[n]:
            if self._ggml.backend_buft_name(types[n]) == _LAYOUT:
                return types[n]
            n += 1
        return None

    def place(self, arena: Arena, context: Pointer, kind: int, blocks: npt.NDArray[np.uint8]) -> Pointer | None:
        """A matrix of these blocks, shape (rows, bytes of a row), or several, shape (matrices, rows, bytes of a row),
        laid out anew; None where there is no kernel for it.

        Takes as much memory as `blocks`, which are copied, in a buffer that `arena` owns.
        """
        ggml, (*n_matrices, n_rows, line) = self._ggml, blocks.shape
        if self._type is None or n_rows % ROWS_STEP:
            return None
        n_columns = line // ggml.type_size(kind) * ggml.blck_size(kind)
        tensor = ggml.new_tensor_3d(context, kind, n_columns, n_rows, *n_matrices or [1])
        buffer = ggml.backend_buft_alloc_buffer(self._type, ggml.backend_buft_get_alloc_size(self._type, tensor))
        if not buffer:
            raise MemoryError(f"ggml has no memory for a matrix of {blocks.nbytes} bytes")
        arena.own(ggml.backend_buffer_free, buffer)
        arena.place_at(tensor, buffer, ggml.backend_buffer_get_base(buffer))
        if not self._has_kernel(tensor, n_columns, several=bool(n_matrices)):
            return None
        copy = np.ascontiguousarray(blocks)
        ggml.backend_tensor_set(tensor, copy.ctypes.data, 0, copy.nbytes)
        return tensor

    def _has_kernel(self, tensor: Pointer, n_columns: int, several: bool) -> bool:
        ggml, arena = self._ggml, Arena(self._ggml)
        context = arena.context(4)
        row = ggml.new_tensor_1d(context, F32, n_columns)
        if several:
            product = ggml.mul_mat_id(context, tensor, row, ggml.new_tensor_1d(context, I32, 1))
        else:
            product = ggml.mul_mat(context, tensor, row)
        return bool(ggml.backend_dev_supports_op(self._device, product))
