"""A rank's part of a GGUF file as ggml tensors: rows are views of the mapped file, columns are copied once, nothing
is requantised."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from hostring.integrations.llm.checkpoint.gguf_header import TensorInfo
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.packed.library import Pointer, at
from hostring.integrations.llm.packed.memory import F32, Arena
from hostring.integrations.llm.packed.repack import ROWS_STEP, Repacker
from hostring.shipping.extents import Extent

FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")
"""Block formats whose products ggml makes from the blocks themselves."""


@dataclass(frozen=True)
class Unit:
    """The columns of one unit of a matrix as a contiguous matrix, [width, rows]; `start` is its first column on this
    rank, and `repacked` says that its rows are laid out anew."""

    tensor: Pointer
    start: int
    width: int
    repacked: bool


class PackedWeights:
    """Cuts tensors of mapped files.

    Args:
        arena: owns what is made here.
        mapped: the files of the model, which `arena` keeps alive.
        tensors: where each tensor lies.
        repacked: formats that are laid out anew, see `Repacker`.
        read: told which bytes are read, before they are.

    Attributes:
        held: file, first byte and size of every range that this rank reads where it lies.
    """

    def __init__(
        self,
        arena: Arena,
        mapped: Sequence[mmap.mmap],
        tensors: dict[str, TensorInfo],
        n_cuts: int,
        repacked: frozenset[GGMLQuantizationType] = frozenset(),
        read: Callable[[Iterable[Extent]], None] = lambda extents: None,
    ) -> None:
        self._arena, self._mapped, self._tensors, self._read = arena, mapped, tensors, read
        self._files = files = [np.frombuffer(file, np.uint8) for file in mapped]
        for data in files:
            arena.keep(data)
        self._context = arena.context(n_cuts)
        self._repacked, self._repacker = repacked, Repacker(arena.ggml)
        self._buffers = [arena.buffer(data.ctypes.data, data.nbytes) for data in files]
        self.held: list[tuple[int, int, int]] = []
        self.copied_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the file that this rank holds, each range once."""
        total, end = 0, (0, 0)
        for part, start, nbytes in sorted(self.held):
            done = end[1] if end[0] == part else 0
            total += max(0, start + nbytes - max(start, done))
            end = part, max(done, start + nbytes)
        return total + self.copied_nbytes

    def read_ahead(self) -> None:
        """Read what this rank holds of the files now, so that the first token doesn't wait for the disk."""
        for part, start, nbytes in self.held:
            self._files[part][start : start + nbytes : mmap.PAGESIZE].sum()

    def rows(self, name: str, rows: range) -> Pointer:
        """Rows of a matrix to multiply by: laid out anew, or where they lie in the file.

        What is laid out anew has rows of zeros at its end, up to a multiple of `ROWS_STEP`.
        """
        info = self._tensors[name]
        start, nbytes = info.offset + rows.start * info.row_nbytes, len(rows) * info.row_nbytes
        if info.kind in self._repacked and rows:
            self._read([Extent(info.part, start, nbytes)])
            blocks = self._files[info.part][start : start + nbytes].reshape(len(rows), info.row_nbytes)
            blocks = np.pad(blocks, ((0, -len(rows) % ROWS_STEP), (0, 0))) if len(rows) % ROWS_STEP else blocks
            tensor = self._laid_out(info, blocks, nbytes)
            self._forget(info.part, start, nbytes)
            return tensor
        pointer = self._mapped_rows(info, rows)
        self.held.append((info.part, start, nbytes))
        return pointer

    def whole(self, name: str) -> Pointer:
        """A matrix of which this rank reads single rows, where it lies in the file: it is not counted as held."""
        info = self._tensors[name]
        return self._mapped_rows(info, range(info.shape[0]))

    def _mapped_rows(self, info: TensorInfo, rows: range) -> Pointer:
        start = info.offset + rows.start * info.row_nbytes
        self._read([Extent(info.part, start, len(rows) * info.row_nbytes)])
        tensor = self._arena.ggml.new_tensor_2d(self._context, int(info.kind), info.shape[-1], len(rows))
        return self._placed(tensor, info, start)

    def stack(self, names: Sequence[str], rows: range) -> Pointer:
        """The same rows of several matrices, [columns, rows, matrices]: laid out anew, or where they lie in the file if
        that is at equal distances.

        Raises:
            ValueError: the matrices have several formats.
        """
        infos = self._alike(names)
        first, step = infos[0], infos[-1].offset - infos[-2].offset if len(infos) > 1 else 0
        starts, nbytes = [info.offset + rows.start * info.row_nbytes for info in infos], len(rows) * first.row_nbytes
        self._read([Extent(info.part, start, nbytes) for info, start in zip(infos, starts, strict=True)])
        even = all(info.part == first.part and info.offset == first.offset + n * step for n, info in enumerate(infos))
        if rows and (first.kind in self._repacked or not even):
            blocks = [self._blocks(info)[rows.start : rows.stop] for info in infos]
            tensor = self._stacked(blocks, first, first.kind in self._repacked)
            for info, start in zip(infos, starts, strict=True):
                self._forget(info.part, start, nbytes)
            return tensor
        self.held += [(info.part, start, nbytes) for info, start in zip(infos, starts, strict=True)]
        tensor = self._arena.ggml.new_tensor_3d(self._context, int(first.kind), first.shape[1], len(rows), len(infos))
        at(tensor).nb[2], at(tensor).nb[3] = step, step * len(infos)
        return self._placed(tensor, first, starts[0])

    def _alike(self, names: Sequence[str]) -> list[TensorInfo]:
        """Where several matrices lie that are to be one tensor."""
        infos = [self._tensors[name] for name in names]
        for name, info in zip(names, infos, strict=True):
            if info.kind != infos[0].kind:
                raise ValueError(
                    f"{name} is stored as {info.kind.name}, and {names[0]} as {infos[0].kind.name}; packed compute "
                    "needs one format for the experts of a layer; compute exact"
                )
        return infos

    def _blocks(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """A matrix as it is stored, shape (rows, bytes of a row)."""
        stored = self._files[info.part][info.offset : info.offset + info.shape[0] * info.row_nbytes]
        return stored.reshape(info.shape[0], info.row_nbytes)

    def _stacked(self, blocks: Sequence[npt.NDArray[np.uint8]], info: TensorInfo, repacked: bool) -> Pointer:
        """A copy of matrices of one shape as one tensor."""
        nbytes = sum(one.size for one in blocks)
        if repacked:
            return self._laid_out(info, np.stack(blocks) if len(blocks) > 1 else blocks[0], nbytes)
        n_rows, line = blocks[0].shape
        copy = self._arena.array((len(blocks), n_rows, line), np.uint8)
        for own, theirs in zip(copy, blocks, strict=True):
            np.copyto(own, theirs)
        self.copied_nbytes += nbytes
        block, block_nbytes = GGML_QUANT_SIZES[info.kind]
        width = line // block_nbytes * block
        tensor = self._arena.ggml.new_tensor_3d(self._context, int(info.kind), width, n_rows, len(blocks))
        return self._arena.place(tensor, copy)

    def _laid_out(self, info: TensorInfo, blocks: npt.NDArray[np.uint8], nbytes: int) -> Pointer:
        """`nbytes`: of the file."""
        tensor = self._repacker.place(self._arena, self._context, int(info.kind), blocks)
        assert tensor is not None, "check_formats has tried this format"
        self.copied_nbytes += nbytes
        return tensor

    def vector(self, name: str, elements: range | None = None) -> Pointer:
        """Elements of a vector.

        Raises:
            ValueError: it is not stored in float32, which ggml adds and multiplies by.
        """
        info = self._tensors[name]
        if info.kind != GGMLQuantizationType.F32:
            raise ValueError(f"{name} is stored as {info.kind.name}; packed compute needs F32; compute exact")
        elements = range(info.shape[-1]) if elements is None else elements
        start = info.offset + 4 * elements.start
        self._read([Extent(info.part, start, 4 * len(elements))])
        self.held.append((info.part, start, 4 * len(elements)))
        if start % 32:  # where ggml wants no tensor to begin
            return self.constant(self._files[info.part][start : start + 4 * len(elements)].view(np.float32))
        tensor = self._arena.ggml.new_tensor_1d(self._context, F32, len(elements))
        return self._placed(tensor, info, start)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A vector or a small matrix in float32, copied.

        Raises:
            ValueError: it is stored in blocks.
        """
        info = self._tensors[name]
        if info.kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
            raise ValueError(f"{name} is stored as {info.kind.name}; packed compute needs F32 or F16; compute exact")
        nbytes = int(np.prod(info.shape[:-1])) * info.row_nbytes
        self._read([Extent(info.part, info.offset, nbytes)])
        self.copied_nbytes += nbytes
        stored = self._files[info.part][info.offset : info.offset + nbytes]
        found: npt.NDArray[np.float32] = dequantize(stored, info.kind).astype(np.float32).reshape(info.shape)
        return found

    def _placed(self, tensor: Pointer, info: TensorInfo, start: int) -> Pointer:
        return self._arena.place_at(tensor, self._buffers[info.part], self._files[info.part].ctypes.data + start)

    def constant(self, values: npt.NDArray[np.float32]) -> Pointer:
        """A vector or a matrix of these values."""
        copy = self._arena.array(values.shape)
        copy[:] = values
        rows, columns = values.shape if values.ndim == 2 else (1, values.size)
        return self._arena.place(self._arena.ggml.new_tensor_2d(self._context, F32, columns, rows), copy)

    def columns(self, names: Sequence[str], units: Sequence[range]) -> list[Unit]:
        """The columns of each unit, copied into a contiguous matrix; those of several matrices of one shape into one
        tensor, [width, rows, matrices]. Units follow each other.

        Strided views of the file would save the copy and cost 2.6 times the time of every product.

        Raises:
            ValueError: a cut is inside of a block, or the matrices have several formats.
        """
        infos = self._alike(names)
        info, n_rows = infos[0], infos[0].shape[0]
        block, block_nbytes = GGML_QUANT_SIZES[info.kind]
        repacked, found = info.kind in self._repacked and n_rows % ROWS_STEP == 0, []
        for unit in units:
            if unit.start % block or unit.stop % block:
                raise ValueError(
                    f"{names[0]}: columns {unit.start} to {unit.stop} cut {info.kind.name} blocks of {block}"
                )
            start, stop = (end // block * block_nbytes for end in (unit.start, unit.stop))
            rows = range(n_rows)
            self._read([Extent.of_matrix(one.part, one.offset, one.row_nbytes, rows, start, stop) for one in infos])
            tensor = self._stacked([self._blocks(one)[:, start:stop] for one in infos], info, repacked)
            found.append(Unit(tensor, unit.start - units[0].start, len(unit), repacked))
        for one in infos:
            self._forget(one.part, one.offset, n_rows * one.row_nbytes)
        return found

    def _forget(self, part: int, start: int, nbytes: int) -> None:
        """Give back the memory that whole pages of a file take in this process: what they hold has been copied."""
        first, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > first:
            self._mapped[part].madvise(mmap.MADV_DONTNEED, first, stop - first)


def column_unit(tensors: dict[str, TensorInfo], names: Sequence[str]) -> int:
    """The fewest columns that no cut may divide, in all of these matrices: the least common multiple of their
    blocks."""
    return int(np.lcm.reduce([GGML_QUANT_SIZES[tensors[name].kind][0] for name in names]))


def column_units(config: ModelConfig, tensors: dict[str, TensorInfo]) -> tuple[int, int]:
    """The same for the output projections of attention, and for the down projections of MLPs or experts."""
    layers = range(config.num_hidden_layers)
    downs = [f"{n}." for n in range(config.experts.count)] if config.experts else [""]
    o = [f"blk.{n}.attn_output.weight" for n in layers]
    down = column_unit(tensors, [f"blk.{n}.ffn_down.{e}weight" for n in layers for e in downs])
    if config.experts and (shared := config.experts.shared_columns):
        shared_down = column_unit(tensors, [f"blk.{n}.ffn_down_shexp.weight" for n in layers])
        down = _with_shared(down, config.intermediate_size, shared, shared_down)
    return column_unit(tensors, o), down


def _with_shared(unit: int, columns: int, shared: int, shared_unit: int) -> int:
    """The fewest columns of an expert, whole units, that the shared expert follows with whole units of its own; all
    columns where that is no part of them."""
    for n in range(unit, columns, unit):
        if columns % n == 0 and shared * n % (columns * shared_unit) == 0:
            return n
    return columns


def unsupported(config: ModelConfig, tensors: dict[str, TensorInfo]) -> str:
    """What keeps a file from being decoded packed, and why; empty when nothing does."""
    if config.windows:
        return f"sliding windows of {max(config.windows)} positions are not computed packed"
    if config.qk_norm_across:
        return "norms over all queries of a token together are not computed packed"
    if config.experts is not None and config.experts.count < 2:
        return "it has a single expert"
    for name, info in tensors.items():
        if info.kind.name not in FORMATS:
            return f"{name} is stored as {info.kind.name}; packed are {', '.join(FORMATS)}"
    return ""
