"""Compares ggml with gguf before a file is decoded packed: products of the file's own blocks, one matrix per format."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from hostring.integrations.llm.checkpoint.gguf_header import TensorInfo
from hostring.integrations.llm.packed.graph import Graph, compute_once
from hostring.integrations.llm.packed.library import Ggml, Unavailable
from hostring.integrations.llm.packed.memory import F32, Arena
from hostring.integrations.llm.packed.weights import MAX_CHECKED_ROWS, MAX_PRODUCT_ERROR, random_factors


def check_formats(ggml: Ggml, files: Sequence[npt.NDArray[np.uint8]], tensors: dict[str, TensorInfo]) -> None:
    """Multiply a few rows of one matrix per format. files: of the model, mapped.

    Raises:
        Unavailable: ggml's block sizes or products differ from gguf's.
    """
    matrices = {info.kind: (name, info) for name, info in tensors.items() if len(info.shape) == 2}
    for kind, (name, info) in matrices.items():
        block, block_nbytes = GGML_QUANT_SIZES[kind]
        if (ggml.blck_size(int(kind)), ggml.type_size(int(kind))) != (block, block_nbytes):
            raise Unavailable(
                f"ggml's blocks of {kind.name} are not those of gguf ({block} elements in {block_nbytes} bytes)"
            )
        error = _error(ggml, files[info.part], info)
        if not error <= MAX_PRODUCT_ERROR:
            raise Unavailable(f"ggml's product of {kind.name} blocks ({name}) is off by {error:.1%}")


def _error(ggml: Ggml, data: npt.NDArray[np.uint8], info: TensorInfo) -> float:
    """The error of a few products together, relative to their norm."""
    arena = Arena(ggml)
    n_rows = min(MAX_CHECKED_ROWS, info.shape[0])
    blocks = arena.array((n_rows, info.row_nbytes), np.uint8)
    blocks[:] = data[info.offset : info.offset + blocks.nbytes].reshape(blocks.shape)
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
