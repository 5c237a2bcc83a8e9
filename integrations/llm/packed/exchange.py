"""What enters and leaves the graphs of a step: arrays that Python fills and reads, and tensors over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from hostring.integrations.llm.packed.library import Pointer
from hostring.integrations.llm.packed.memory import F16, F32, I32, I64, Arena


@dataclass(frozen=True)
class SequenceRows:
    """The rows of one sequence in a step: `first` to `first` + `n_rows` - 1 of all rows.

    They attend to `n_cached` positions, masked beyond their own; a single row to as many as are set before the step.
    """

    number: int
    first: int
    n_rows: int
    n_cached: int


Shape = tuple[tuple[int, int], ...]  # (new rows, cached positions) of each sequence


def rows_of(shape: Shape) -> list[SequenceRows]:
    """The sequences of a step, one after another."""
    firsts = accumulate((n_rows for n_rows, _ in shape), initial=0)
    return [SequenceRows(n, first, *rows) for n, (first, rows) in enumerate(zip(firsts, shape, strict=False))]


@dataclass
class Inputs:
    """Tensors over the arrays of an `Exchange`, in one context."""

    ggml: Any
    context: Pointer
    n_rows: int
    x: Pointer
    slots: list[Pointer]
    ids: Pointer
    positions: Pointer
    last: Pointer
    mixed: Pointer
    masks: list[Pointer | None]
    _index: Pointer

    def index(self, sequence: SequenceRows) -> Pointer:
        """Where in its cache each row of a sequence is written."""
        if sequence.n_rows == self.n_rows:
            return self._index
        return self.ggml.view_1d(self.context, self._index, sequence.n_rows, 8 * sequence.first)


class Exchange:
    """Arrays of one shape of a step.

    Attributes:
        x: the residual stream, shape (rows, hidden). slots: partial sums, shape (slots, rows, hidden).
        ids, positions, index: of the new rows; `index` is where they stand in their caches. last: the rows whose logits
            are wanted: the last one of each sequence, or every one.
        mixed: what attention gives, shape (rows, heads * head_dim).
        masks: what each row may see, shape (rows, cached), of each sequence; None for a single row.
        logits: shape (rows that are wanted, local vocabulary). head_rows: the same, and what the head has beyond it.
    """

    def __init__(
        self,
        arena: Arena,
        sequences: Sequence[SequenceRows],
        hidden: int,
        mixed: int,
        n_slots: int,
        n_logits: int,
        n_head_rows: int,
        every: bool = False,
    ) -> None:
        self._arena, self.sequences = arena, sequences
        self.n_rows = n_rows = sum(s.n_rows for s in sequences)
        self.x: npt.NDArray[np.float32] = arena.array((n_rows, hidden))
        self.slots: npt.NDArray[np.float32] = arena.array((n_slots, n_rows, hidden))
        self.ids: npt.NDArray[np.int32] = arena.array((n_rows,), np.int32)
        self.positions: npt.NDArray[np.int32] = arena.array((n_rows,), np.int32)
        self.index: npt.NDArray[np.int64] = arena.array((n_rows,), np.int64)
        last = range(n_rows) if every else [s.first + s.n_rows - 1 for s in sequences]
        self.last: npt.NDArray[np.int32] = arena.array((len(last),), np.int32)
        self.last[:] = last
        self.mixed: npt.NDArray[np.float32] = arena.array((n_rows, mixed))
        self.masks = [arena.array((s.n_rows, s.n_cached), np.float16) if s.n_rows > 1 else None for s in sequences]
        self.head_rows: npt.NDArray[np.float32] = arena.array((len(last), n_head_rows))
        self.logits = self.head_rows[:, :n_logits]
        self._mixed_buffer = arena.buffer(self.mixed.ctypes.data, self.mixed.nbytes)

    def tensors(self, context: Pointer) -> Inputs:
        """Tensors over the arrays that graphs read."""
        new = self._arena.ggml

        def vector(array: npt.NDArray[Any], kind: int) -> Pointer:
            return self._arena.place(new.new_tensor_1d(context, kind, array.size), array)

        def matrix(array: npt.NDArray[Any], kind: int = F32) -> Pointer:
            return self._arena.place(new.new_tensor_2d(context, kind, array.shape[1], array.shape[0]), array)

        return Inputs(
            new,
            context,
            self.n_rows,
            x=matrix(self.x),
            slots=[matrix(slot) for slot in self.slots],
            ids=vector(self.ids, I32),
            positions=vector(self.positions, I32),
            last=vector(self.last, I32),
            mixed=matrix(self.mixed),
            masks=[None if mask is None else matrix(mask, F16) for mask in self.masks],
            _index=vector(self.index, I64),
        )

    def place_rows(self, tensor: Pointer, sequence: SequenceRows) -> Pointer:
        """Let `tensor` be the rows of one sequence in `mixed`."""
        return self._arena.place_at(tensor, self._mixed_buffer, self.mixed[sequence.first :].ctypes.data)

    def fill(self, sequence: SequenceRows, ids: Sequence[int], start: int) -> None:
        """The new rows of a sequence: `ids` at positions `start` …"""
        stop, rows = start + len(ids), slice(sequence.first, sequence.first + sequence.n_rows)
        self.ids[rows] = ids
        self.positions[rows] = self.index[rows] = np.arange(start, stop)
        mask = self.masks[sequence.number]
        if mask is not None:
            seen = np.arange(sequence.n_cached) <= np.arange(start, stop)[:, None]
            mask[:] = np.where(seen, np.float16(0), np.float16(-np.inf))
