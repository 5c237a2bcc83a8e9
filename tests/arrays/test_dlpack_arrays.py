"""Arrays that hostring knows only through DLPack. `test_real_libraries.py` has JAX and MLX themselves."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import bits, fold_in_order, rank_distinct

TOPOLOGIES = [("mesh", "rank"), ("ring", "rank"), ("star", "rank"), ("tree", "tree")]


class Shelf:
    """An array of a library that hostring doesn't know: it has `__dlpack__`, a namespace, and no assignment."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self.dtype, self.shape = values.dtype, values.shape

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._values.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return ShelfLibrary


class ShelfLibrary:
    @staticmethod
    def from_dlpack(x: Any) -> Shelf:
        return Shelf(np.from_dlpack(x).copy())


class HalfShelf(Shelf):
    """It holds bfloat16, of which numpy makes no DLPack capsule, and can be read as an array instead."""

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError("no such dtype")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._values.copy()

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return HalfShelfLibrary


class HalfShelfLibrary:
    @staticmethod
    def asarray(x: np.ndarray) -> HalfShelf:
        return HalfShelf(x)


class Nameless:
    """`__dlpack__` and nothing else."""

    dtype, shape = np.dtype(np.float32), (2,)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return np.ones(2, np.float32).__dlpack__(**kwargs)


@pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
@pytest.mark.parametrize(
    ("kind", "dtype"), [(Shelf, np.float32), (Shelf, np.float16), (Shelf, np.int16), (HalfShelf, ml_dtypes.bfloat16)]
)
def test_dlpack_arrays_are_left_alone_and_new_ones_returned(run_ranks, topology, order, kind, dtype):
    rows = [row.reshape(3, 4) for row in rank_distinct(3, 12, dtype)]
    wire = np.dtype(np.int16 if dtype is np.int16 else np.float32)
    total = fold_in_order(order, [row.astype(wire) for row in rows]).astype(dtype)

    def body(comm):
        x = kind(rows[comm.rank].copy())
        results = [
            comm.all_reduce(x),
            comm.broadcast(x, 1),
            comm.all_gather(x),
            comm.reduce_scatter(x),
            comm.all_to_all(x),
        ]
        assert bits(x._values) == bits(rows[comm.rank])
        if comm.rank == 0:
            comm.send(x, 1)
        if comm.rank == 1:
            results.append(comm.recv(x, 0))
        return results

    for rank, results in enumerate(run_ranks(3, body, topology=topology, order=order)):
        assert all(type(r) is kind for r in results)
        got = [r._values for r in results]
        expected = [
            total,
            rows[1],
            np.stack(rows),
            total[rank : rank + 1],
            np.stack([row[rank] for row in rows]),
            rows[0],
        ]
        assert [g.shape for g in got] == [e.shape for e in expected[: len(got)]]
        assert [bits(g) for g in got] == [bits(e) for e in expected[: len(got)]]


def test_dlpack_without_a_way_back_is_refused_up_front(run_ranks):
    def body(comm):
        with pytest.raises(TypeError, match="register an adapter"):
            comm.all_reduce(Nameless())
        return comm.all_reduce(np.ones(1)).tolist()

    assert run_ranks(2, body) == [[2.0]] * 2
