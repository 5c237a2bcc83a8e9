"""What results must be, computed apart from hostring: the declared folds, written down once, in plain numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from hostring import Comm
from hostring.arrays.dtypes import BY_NAME

HELD = {
    ("mesh", "one_shot"): ("rank", "ring", "tree"),
    ("mesh", "two_shot"): ("rank", "ring", "tree"),
    ("ring", "relay"): ("rank", "ring", "tree"),
    ("ring", "chain"): ("rank",),
    ("ring", "rotate"): ("ring",),
    ("star", "stream"): ("rank", "ring", "tree"),
    ("tree", "reduce_broadcast"): ("tree",),
    ("dissemination", "doubling"): ("rank", "ring", "tree"),
}
"""Which order each variant can hold, as docs and design say."""

COMBINATIONS = [(topology, variant, order) for (topology, variant), orders in HELD.items() for order in orders]


def fold_in_order(order: str, rows: Sequence[np.ndarray], ufunc: Any = np.add) -> np.ndarray:
    """Fold flat arrays, one per rank, as `order` declares, in the dtype that they have."""
    if order == "rank":
        return _left_to_right(rows, ufunc)
    if order == "tree":
        return _tree(rows, ufunc)
    result = np.empty_like(rows[0])
    for chunk, (start, stop) in enumerate(chunks(rows[0].size, len(rows))):
        first = (chunk + 1) % len(rows)
        result[start:stop] = _left_to_right([row[start:stop] for row in [*rows[first:], *rows[:first]]], ufunc)
    return result


def _left_to_right(rows: Sequence[np.ndarray], ufunc: Any) -> np.ndarray:
    total = rows[0]
    for row in rows[1:]:
        total = ufunc(total, row)
    return total


def _tree(rows: Sequence[np.ndarray], ufunc: Any) -> np.ndarray:
    if len(rows) == 1:
        return rows[0]
    half = 1
    while half * 2 < len(rows):
        half *= 2
    return ufunc(_tree(rows[:half], ufunc), _tree(rows[half:], ufunc))


def chunks(n_elements: int, parts: int) -> Iterator[tuple[int, int]]:
    """Consecutive parts, the longer ones first, as numpy's `array_split` makes them."""
    for piece in np.array_split(np.arange(n_elements + 1)[:n_elements], parts):
        yield (int(piece[0]), int(piece[-1]) + 1) if piece.size else (0, 0)


def rank_distinct(world_size: int, n_elements: int, dtype: Any = np.float32, seed: int = 0) -> list[np.ndarray]:
    """Different values on every rank and in every place, of mixed magnitude, so that another fold order gives other
    bits.
    """
    rng = np.random.default_rng([seed, world_size, n_elements])
    dtype = np.dtype(dtype)
    rows = []
    for _ in range(world_size):
        if dtype == np.bool_:
            row = rng.random(n_elements) < 0.5
        elif dtype.kind in "iu":
            info = np.iinfo(dtype)
            row = rng.integers(info.min, info.max, n_elements, dtype, endpoint=True)
        elif dtype.kind == "c":
            row = rng.standard_normal(n_elements) + 1j * rng.standard_normal(n_elements)
        else:
            magnitude = min(8, int(np.log2(float(ml_dtypes.finfo(dtype).max))) // 2)
            row = rng.standard_normal(n_elements) * 2.0 ** rng.integers(-magnitude, magnitude + 1, n_elements)
            if dtype.name == "float8_e8m0fnu":  # powers of two, and nothing else
                row = np.abs(row)
        rows.append(row.astype(dtype))
    return rows


def host(x: Any) -> np.ndarray:
    """A numpy array of the same bits as `x`, a numpy array or a CPU tensor."""
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(x)
    dtype = BY_NAME[str(x.dtype).removeprefix("torch.")]
    import torch

    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    plain = x.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(widths[dtype.itemsize]).numpy().view(dtype).reshape(tuple(x.shape))


def bits(x: Any) -> bytes:
    """The bytes of an array in C order."""
    return np.ascontiguousarray(host(x)).tobytes()


def as_library(x: np.ndarray, library: str) -> Any:
    """A copy of `x` as an array of "numpy" or "torch"."""
    if library == "numpy":
        return x.copy()
    import torch

    raw = torch.from_numpy(np.ascontiguousarray(x).view(f"u{min(x.itemsize, 8)}").copy())
    return raw.view(getattr(torch, x.dtype.name)).reshape(x.shape)


def force(comm: Comm, variant: str, segment: int) -> None:
    """Make `comm` use one all-reduce variant for every size, and short segments for everything.

    Every rank must do the same.
    """
    comm.session.tuner.force(variant, segment)
    comm.session.tuner.segment = lambda itemsize: segment  # type: ignore[method-assign]
