"""Compares ggml with gguf before a file is decoded packed: products of the file's own blocks, one matrix per format."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from hostring.integrations.llm.checkpoint.gguf_header import TensorInfo
from hostring.integrations.llm.packed.graph import Graph, compute_once
from hostring.integrations.llm.packed.library import Ggml, Unavailable
from hostring.integrations.llm.packed.memory import F32, Arena
from hostring.integrations.llm.packed.weights import MAX_CHECKED_ROWS, MAX_PRODUCT_ERROR, random_factors
from hostring.shipping.extents import Extent


def checked_rows(tensors: dict[str, TensorInfo]) -> list[Extent]:
    """Where the rows lie that `check_formats` multiplies."""
    return [
        Extent(info.part, info.offset, info.row_nbytes * min(MAX_CHECKED_ROWS, info.shape[0]))
        for _, info in _matrices(tensors).values()
    ]


def _matrices(tensors: dict[str, TensorInfo]) -> dict[GGMLQuantizationType, tuple[str, TensorInfo]]:
    """One matrix per format, with its name."""
    return {info.kind: (name, info) for name, info in tensors.items() if len(info.shape) == 2}


def check_formats(ggml: Ggml, files: Sequence[npt.NDArray[np.uint8]], tensors: dict[str, TensorInfo]) -> None:
    """Multiply a few rows of one matrix per format. files: of the model, mapped; they hold `checked_rows`.

    Raises:
        Unavailable: ggml's block sizes or products differ from gguf's.
    """
    for kind, (name, info) in _matrices(tensors).items():
        block, block_nbytes = GGML_QUANT_SIZES[kind]
        if (ggml.blck_size(int(kind)), ggml.type_size(int(kind))) != (block, block_nbytes):
            raise Unavailable(
                f"ggml's blocks of {kind.name} are not those of gguf ({block} elements in {block_nbytes} bytes)"
            )
        error = _error(ggml, files[info.part], info)
        if not error <= MAX_PRODUCT_ERROR:
            raise Unavailable(f"ggml's product of {kind.name} blocks ({name}) is off by {error:.1%}")
        if kind != GGMLQuantizationType.F32 and not _converts_alike(ggml, files[info.part], info):
            raise Unavailable(f"ggml converts {kind.name} blocks ({name}) to other numbers than gguf does")


def _blocks(data: npt.NDArray[np.uint8], info: TensorInfo) -> npt.NDArray[np.uint8]:
    """The first rows of a matrix as they are stored."""
    n_rows = min(MAX_CHECKED_ROWS, info.shape[0])
    return data[info.offset : info.offset + n_rows * info.row_nbytes].reshape(n_rows, info.row_nbytes)


def _converts_alike(ggml: Ggml, data: npt.NDArray[np.uint8], info: TensorInfo) -> bool:
    """Whether float32 of a few rows are gguf's, but for one rounding."""
    blocks = np.ascontiguousarray(_blocks(data, info))
    wanted = dequantize(blocks, info.kind)
    found = np.empty(wanted.shape, np.float32)
    ggml.to_float(int(info.kind))(blocks.ctypes.data, found.ctypes.data, found.size)
    return bool(np.allclose(found, wanted, rtol=1e-6, atol=1e-6 * float(np.abs(wanted).max(initial=0.0))))


def _error(ggml: Ggml, data: npt.NDArray[np.uint8], info: TensorInfo) -> float:
    """The error of a few products together, relative to their norm."""
    arena = Arena(ggml)
    stored = _blocks(data, info)
    n_rows = len(stored)
    blocks = arena.array(stored.shape, np.uint8)
    blocks[:] = stored
    x, y = arena.array((1, info.shape[1])), arena.array((1, n_rows))
    x[0] = random_factors(info.shape[1])
    graph = Graph(arena, 8)
    matrix = arena.place(ggml.new_tensor_2d(graph.context, int(info.kind), info.shape[1], n_rows), blocks)
    row = arena.place(ggml.new_tensor_2d(graph.context, F32, info.shape[1], 1), x)
    product = arena.place(ggml.mul_mat(graph.context, matrix, row), y)
    graph.expand(product)
    compute_once(arena, graph)
    wanted = dequantize(blocks, info.kind).astype(np.float64) @ x[0]
    return float(np.linalg.norm(y[0] - wanted) / max(np.linalg.norm(wanted), np.finfo(np.float32).tiny))
