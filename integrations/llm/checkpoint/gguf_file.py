"""GGUF checkpoints: memory-mapped; only the blocks that cover a rank's slices are dequantised."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from hostring.integrations.llm.checkpoint.arriving import source_of
from hostring.integrations.llm.checkpoint.checkpoint import check_shape, check_tensors, missing
from hostring.integrations.llm.checkpoint.gguf_config import INTERLEAVED, config_from_gguf
from hostring.integrations.llm.checkpoint.gguf_header import TensorInfo
from hostring.integrations.llm.checkpoint.gguf_names import gguf_name
from hostring.integrations.llm.checkpoint.gguf_parts import read_parts
from hostring.integrations.llm.checkpoint.gguf_rope import with_divisors
from hostring.integrations.llm.checkpoint.layout import TensorSlice, layer_of, renumbered
from hostring.integrations.llm.model.rope import RopeScaling
from hostring.shipping.extents import Extent

_ROPE = "rope_freqs.weight"
_TABLES = (".attn_rot_embd", ".attn_rot_embd.weight", "rotary_emb.inv_freq")
_SIXTEEN_BIT = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}


class GgufCheckpoint:
    """A GGUF file under HF names, or several that are one model.

    Args:
        path: the file, or any of them.

    Attributes:
        fields: the metadata.
        tensors: where each tensor lies.
        mapped: the files.
        source: asked for bytes before they are read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, source_of(path)
        parts = read_parts(path)
        self.fields, self.tensors, self.mapped = parts.fields, parts.tensors, parts.mapped
        shapes = {name: info.shape for name, info in self.tensors.items()}
        self.config = config_from_gguf(path, self.fields, shapes)
        self.bytes_read = 0
        self._interleaved = self.config.model_type in INTERLEAVED
        check_tensors(path, self.config, shapes, harmless=self._is_harmless, named=gguf_name)
        for name, info in self.tensors.items():
            _check_kind(path, name, info)
        if _ROPE in self.tensors:
            self.config = replace(self.config, rope_scaling=self._rope_table(self.tensors[_ROPE]))

    def _is_harmless(self, name: str) -> bool:
        """A tensor of llama's files that holds rope divisors is used; tables that anyone can compute are not needed."""
        return name.endswith(_TABLES) or (name == _ROPE and self._interleaved)

    def _rope_table(self, info: TensorInfo) -> RopeScaling:
        half = self.config.head_dim // 2
        if info.shape != (half,):
            raise ValueError(f"{self.path}: {_ROPE} has shape {info.shape}; expected ({half},), half of head_dim")
        return with_divisors(self.config, self._dequantised(info, range(1), range(half))[0].tolist())

    def of_layers(self, layers: range) -> GgufCheckpoint:
        """The same file with these layers alone, numbered from 0, and a count of bytes of its own."""
        found = copy(self)
        found.tensors = {
            renumbered(name, -layers.start): info
            for name, info in self.tensors.items()
            if (layer := layer_of(name)) is None or layer in layers
        }
        found.config, found.bytes_read = self.config.of_layers(layers), 0
        return found

    def prepare(self, parts: Iterable[TensorSlice]) -> None:
        """See `Checkpoint`."""
        self.source.plan(self.extents(parts))

    def extents(self, parts: Iterable[TensorSlice]) -> list[Extent]:
        """Where these slices lie, in whole blocks."""
        found = []
        for part in parts:
            if (info := self.tensors.get(gguf_name(part.name))) is not None:
                rows, columns = (range(1), part.rows) if part.columns is None else (part.rows, part.columns)
                found.append(_extent(info, rows, columns))
        return found

    def read(self, part: TensorSlice) -> Tensor:
        info = self.tensors.get(gguf_name(part.name))
        if info is None:
            raise missing(self.path, gguf_name(part.name), part.shape)
        check_shape(self.path, part.name, part.shape, info.shape)
        vector = part.columns is None
        rows, columns = (range(1), part.rows) if part.columns is None else (part.rows, part.columns)
        values = self._values(info, rows, columns)
        if self._interleaved and (".q_proj." in part.name or ".k_proj." in part.name):
            values = _halves(values.T if vector else values, self.config.head_dim)
            return values.reshape(-1) if vector else values
        return values[0] if vector else values

    def _values(self, info: TensorInfo, rows: range, columns: range) -> Tensor:
        if info.kind in _SIXTEEN_BIT:  # numpy has no bf16, and f16 need not pass through f32
            raw = self._bytes(info, rows, 2 * columns.start, 2 * columns.stop)
            return torch.from_numpy(raw.copy().view(np.int16)).view(_SIXTEEN_BIT[info.kind])
        return torch.from_numpy(self._dequantised(info, rows, columns))

    def _dequantised(self, info: TensorInfo, rows: range, columns: range) -> npt.NDArray[np.float32]:
        start, stop = _run(info, columns)
        raw, (block, block_nbytes) = self._bytes(info, rows, start, stop), GGML_QUANT_SIZES[info.kind]
        empty = np.zeros((len(rows), (stop - start) // block_nbytes * block), np.float32)  # gguf can't read no blocks
        values = dequantize(np.ascontiguousarray(raw), info.kind) if raw.size else empty
        before = columns.start // block * block
        cut: npt.NDArray[np.float32] = values[:, columns.start - before : columns.stop - before]
        return np.array(cut, dtype=np.float32)

    def _bytes(self, info: TensorInfo, rows: range, start: int, stop: int) -> npt.NDArray[np.uint8]:
        self.source.read([Extent.of_matrix(info.part, info.offset, info.row_nbytes, rows, start, stop)])
        n_rows = info.shape[0] if len(info.shape) > 1 else 1
        whole = np.frombuffer(self.mapped[info.part], np.uint8, n_rows * info.row_nbytes, info.offset).reshape(
            n_rows, info.row_nbytes
        )
        raw = whole[rows.start : rows.stop, start:stop]
        self.bytes_read += raw.size
        return raw


def _run(info: TensorInfo, columns: range) -> tuple[int, int]:
    """First and last byte in a row of the blocks that hold some columns."""
    block, block_nbytes = GGML_QUANT_SIZES[info.kind]
    first, last = columns.start // block, -(-columns.stop // block) if columns else columns.start // block
    return first * block_nbytes, last * block_nbytes


def _extent(info: TensorInfo, rows: range, columns: range) -> Extent:
    return Extent.of_matrix(info.part, info.offset, info.row_nbytes, rows, *_run(info, columns))


def _check_kind(path: Path, name: str, info: TensorInfo) -> None:
    """Refuse elements that nobody says how to scale: bare integers, and formats that `gguf` can't dequantise."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[info.kind][1]), np.uint8), info.kind)
    except NotImplementedError:
        raise ValueError(
            f"{path}: {name} is of format {info.kind.name}, which can't be dequantised here; F32, F16, BF16 "
            f"and the block "
            "formats that the gguf package dequantises are read"
        ) from None


def _halves(values: Tensor, head_dim: int) -> Tensor:
    """Undo the interleaving of whole heads: row 2j + t of a head goes to row t * head_dim / 2 + j. values: (rows,
    columns)."""
    pairs = values.reshape(values.shape[0] // head_dim, head_dim // 2, 2, values.shape[1])
    return pairs.transpose(1, 2).reshape(values.shape)
