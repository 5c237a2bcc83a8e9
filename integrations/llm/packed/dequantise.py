"""Matrices of blocks as float32, by ggml's own conversion, one at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostring.integrations.llm.packed.library import Ggml, Pointer, at
from hostring.integrations.llm.packed.memory import F16, F32

MIN_PART = 1 << 16  # elements that are worth another thread


class Dequantiser:
    """Args: threads: that convert, each its own rows."""

    def __init__(self, ggml: Ggml, threads: int) -> None:
        self._ggml, self._threads = ggml, threads
        self._pool = ThreadPoolExecutor(threads, "hostring-dequantise") if threads > 1 else None
        self._scratch = np.empty(0, np.float32)

    def matrix(self, tensor: Pointer) -> Tensor:
        """The elements of a contiguous matrix, shape (rows, columns); valid until the next call."""
        t = at(tensor)
        n_columns, n_rows = t.ne[0], t.ne[1]
        if t.type == F32:
            return torch.from_numpy(_memory(t.data, (n_rows, n_columns), np.float32))
        if (
            self._scratch.size < n_rows * n_columns
        ):  # torch's memory is aligned: BLAS may add in another order otherwise
            self._scratch = torch.empty(n_rows * n_columns).numpy()
        found = self._scratch[: n_rows * n_columns].reshape(n_rows, n_columns)
        if t.type == F16:  # ggml converts these one by one, torch eight at a time
            halves = torch.from_numpy(_memory(t.data, found.shape, np.float16))
            return torch.from_numpy(found).copy_(halves)
        self._convert(self._ggml.to_float(t.type), t.data, t.nb[1], found)
        return torch.from_numpy(found)

    def rows(self, tensor: Pointer, ids: npt.NDArray[np.int32]) -> Tensor:
        """These rows of a matrix, shape (ids, columns)."""
        t = at(tensor)
        stored = _memory(t.data, (t.ne[1], t.nb[1]), np.uint8)[ids]
        if t.type == F32:
            return torch.from_numpy(stored.view(np.float32))
        found = np.empty((len(ids), t.ne[0]), np.float32)
        self._convert(self._ggml.to_float(t.type), stored.ctypes.data, t.nb[1], found)
        return torch.from_numpy(found)

    def _convert(
        self, convert: Callable[[int, int, int], None], address: int, line: int, out: npt.NDArray[np.float32]
    ) -> None:
        n_rows, n_columns = out.shape
        n_parts = 1 if self._pool is None else max(1, min(self._threads, out.size // MIN_PART))
        cuts = [n_rows * part // n_parts for part in range(n_parts + 1)]

        def part(n: int) -> None:
            first, stop = cuts[n], cuts[n + 1]
            convert(address + first * line, out[first:].ctypes.data, (stop - first) * n_columns)

        if self._pool is None or n_parts == 1:
            part(0)
        else:
            list(self._pool.map(part, range(n_parts)))


def floats(vector: Pointer) -> Tensor:
    """The elements of a vector that is stored in float32."""
    t = at(vector)
    assert t.type == F32
    return torch.from_numpy(_memory(t.data, (t.ne[0],), np.float32))


def _memory(address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array over memory that something else keeps alive."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    stored: npt.NDArray[Any] = np.asarray((ctypes.c_uint8 * nbytes).from_address(address))
    return stored.view(dtype).reshape(shape)
