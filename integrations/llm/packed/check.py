"""Compares ggml with gguf before a file is decoded packed: products of the file's own blocks, one matrix per format."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from hostring.integrations.llm.checkpoint.gguf_header import TensorInfo
from hostring.integrations.llm.packed.graph import Graph, compute_once
from hostring.integrations.llm.packed.library import Ggml, Unavailable
from hostring.integrations.llm.packed.memory import F32, I32, Arena
from hostring.integrations.llm.packed.repack import ROWS_STEP, Repacker
from hostring.shipping.extents import Extent

MAX_CHECKED_ROWS = 16
MAX_PRODUCT_ERROR = 0.05
"""Of products with activations in blocks of 8 bits, relative to their norm; 0.003 to 0.01 is usual."""
MAX_CHECKED_BATCH = 5  # rows that are multiplied together: a kernel may take four at a time

_log = logging.getLogger(__name__)


def checked_rows(tensors: dict[str, TensorInfo]) -> list[Extent]:
    """Where the rows lie that `check_formats` multiplies."""
    checked = [info for _, info in _matrices(tensors).values()]
    checked += [info for pair in _pairs(tensors).values() for info in pair]
    return [Extent(one.part, one.offset, one.row_nbytes * min(MAX_CHECKED_ROWS, one.shape[0])) for one in checked]


def _matrices(tensors: dict[str, TensorInfo]) -> dict[GGMLQuantizationType, tuple[str, TensorInfo]]:
    """One matrix per format, with its name."""
    return {info.kind: (name, info) for name, info in tensors.items() if len(info.shape) == 2}


def _pairs(tensors: dict[str, TensorInfo]) -> dict[GGMLQuantizationType, tuple[TensorInfo, TensorInfo]]:
    """The matrices of the first two experts of a layer, for each format; empty where there are no experts."""
    firsts = [name for name in tensors if name.startswith("blk.") and name.endswith(".0.weight")]
    pairs = [(tensors[name], tensors[name.removesuffix("0.weight") + "1.weight"]) for name in firsts]
    return {first.kind: (first, second) for first, second in pairs if first.kind == second.kind}


def check_experts(ggml: Ggml, files: Sequence[npt.NDArray[np.uint8]], tensors: dict[str, TensorInfo]) -> None:
    """Multiply a row by a few rows of two experts, the second one first.

    Raises:
        Unavailable: ggml's products differ from gguf's.
    """
    for kind, pair in _pairs(tensors).items():
        stored = np.stack([_blocks(files[info.part], info) for info in pair])
        arena, n_columns = Arena(ggml), pair[0].shape[1]
        x, ids, y = arena.array((1, n_columns)), arena.array((1, 2), np.int32), arena.array((2, stored.shape[1]))
        x[0], ids[0] = random_factors(n_columns), (1, 0)
        blocks = arena.array(stored.shape, np.uint8)
        blocks[:] = stored
        graph = Graph(arena, 8)
        matrices = arena.place(ggml.new_tensor_3d(graph.context, int(kind), n_columns, stored.shape[1], 2), blocks)
        row = arena.place(ggml.new_tensor_3d(graph.context, F32, n_columns, 1, 1), x)
        chosen = arena.place(ggml.new_tensor_2d(graph.context, I32, 2, 1), ids)
        graph.expand(arena.place(ggml.mul_mat_id(graph.context, matrices, row, chosen), y))
        compute_once(arena, graph)
        error = max(_relative_error(product, stored[n], kind, x[0]) for product, n in zip(y, ids[0], strict=True))
        if not error <= MAX_PRODUCT_ERROR:
            raise Unavailable(f"ggml's product of experts in {kind.name} blocks is off by {error:.1%}")


def check_formats(ggml: Ggml, files: Sequence[npt.NDArray[np.uint8]], tensors: dict[str, TensorInfo]) -> None:
    """Multiply a few rows of one matrix per format, and of two experts. files: of the model, mapped; they hold
    `checked_rows`.

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
    check_experts(ggml, files, tensors)


def repacked_formats(
    ggml: Ggml, files: Sequence[npt.NDArray[np.uint8]], tensors: dict[str, TensorInfo], batch_invariant: bool
) -> frozenset[GGMLQuantizationType]:
    """The formats of a file that `Repacker` has right and faster kernels for here.

    Args:
        batch_invariant: only those whose products of a row have the same bits whatever rows are beside it.
    """
    found = set()
    for kind, (name, info) in _matrices(tensors).items():
        blocks = _blocks(files[info.part], info)
        blocks = blocks[: len(blocks) // ROWS_STEP * ROWS_STEP]
        if not len(blocks):
            continue
        x = random_factors(MAX_CHECKED_BATCH * info.shape[1]).reshape(MAX_CHECKED_BATCH, -1)
        y = _products(ggml, kind, blocks, x, repacked=True)
        if y is None:
            continue
        if not _relative_error(y, blocks, kind, x) <= MAX_PRODUCT_ERROR:
            _log.warning("ggml's repacked product of %s blocks (%s) is wrong; it is computed without", kind.name, name)
            continue
        singles = [_products(ggml, kind, blocks, row[None], repacked=True) for row in x] if batch_invariant else []
        if all(one is not None and np.array_equal(one[0], together) for one, together in zip(singles, y, strict=False)):
            found.add(kind)
    return frozenset(found)


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
    blocks, x = _blocks(data, info), random_factors(info.shape[1])[None]
    y = _products(ggml, info.kind, blocks, x)
    assert y is not None
    return _relative_error(y, blocks, info.kind, x)


def _products(
    ggml: Ggml,
    kind: GGMLQuantizationType,
    stored: npt.NDArray[np.uint8],
    factors: npt.NDArray[np.float32],
    repacked: bool = False,
) -> npt.NDArray[np.float32] | None:
    """Rows of `factors` times the matrix of these blocks, shape (rows, blocks' rows); None where there is no kernel."""
    arena, (n_rows, n_columns) = Arena(ggml), (len(stored), factors.shape[1])
    x, y = arena.array(factors.shape), arena.array((len(factors), n_rows))
    x[:] = factors
    graph = Graph(arena, 8)
    if repacked:
        matrix = Repacker(ggml).place(arena, graph.context, int(kind), stored)
        if matrix is None:
            return None
    else:
        blocks = arena.array(stored.shape, np.uint8)
        blocks[:] = stored
        matrix = arena.place(ggml.new_tensor_2d(graph.context, int(kind), n_columns, n_rows), blocks)
    rows = arena.place(ggml.new_tensor_2d(graph.context, F32, n_columns, len(factors)), x)
    graph.expand(arena.place(ggml.mul_mat(graph.context, matrix, rows), y))
    compute_once(arena, graph)
    return y.copy()


def _relative_error(
    y: npt.NDArray[np.float32],
    blocks: npt.NDArray[np.uint8],
    kind: GGMLQuantizationType,
    factors: npt.NDArray[np.float32],
) -> float:
    wanted = factors.astype(np.float64) @ dequantize(np.ascontiguousarray(blocks), kind).astype(np.float64).T
    return float(np.linalg.norm(y - wanted) / max(np.linalg.norm(wanted), np.finfo(np.float32).tiny))


def random_factors(n: int) -> npt.NDArray[np.float32]:
    """Activations for a check, the same every time."""
    return np.random.default_rng(0).standard_normal(n).astype(np.float32)
