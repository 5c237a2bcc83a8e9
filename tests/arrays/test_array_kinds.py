"""Every kind of numpy array in every layout through every sort of collective, and kinds that are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import bits, fold_in_order, rank_distinct

torch = pytest.importorskip("torch")

SHAPE = (4, 6)


class Tagged(np.ndarray):
    """A subclass that keeps its type, and its two dimensions, through everything that numpy does with it."""

    def ravel(self, order: Any = "C") -> Any:
        return self

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        return self

    def __array_finalize__(self, parent: Any) -> None:
        self.tag = getattr(parent, "tag", "mine")


def memmap(x: np.ndarray, folder: Any, mode: str = "w+") -> np.memmap:
    mapped = np.memmap(
        folder / f"{x.dtype.str[1:]}{np.random.default_rng().integers(1 << 62)}", x.dtype, "w+", shape=x.shape
    )
    mapped[...] = x
    mapped.flush()
    return mapped if mode == "w+" else np.memmap(mapped.filename, x.dtype, mode, shape=x.shape)


def unaligned(x: np.ndarray) -> np.ndarray:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    view = memory[1:].view(x.dtype) if x.itemsize == 1 else np.frombuffer(memory.data, x.dtype, x.size, 1)
    view = view.reshape(x.shape)
    view[...] = x
    return view


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


KINDS: dict[str, Any] = {
    "ndarray": lambda x, folder: x.copy(),
    "matrix": lambda x, folder: np.matrix(x, copy=True),
    "recarray": lambda x, folder: x.copy().view(np.recarray),
    "a subclass that lies": lambda x, folder: x.copy().view(Tagged),
    "memmap": memmap,
    "read-only memmap": lambda x, folder: memmap(x, folder, "r"),
    "big-endian": lambda x, folder: x.astype(x.dtype.newbyteorder(">")),
    "unaligned": lambda x, folder: unaligned(x),
    "read-only": lambda x, folder: read_only(x),
}

LAYOUTS: dict[str, Any] = {
    "C": lambda x: x,
    "Fortran": lambda x: np.asarray(x).copy("F").view(type(x)) if x.flags.writeable and x.dtype.isnative else x.T,
    "transposed": lambda x: x.T,
    "negative strides": lambda x: x[::-1, ::-1],
    "every second": lambda x: x[::2, ::2],
    "a column": lambda x: x[:, 1:2],
    "empty": lambda x: x[:0],
    "one element": lambda x: x[1:2, 2:3],
}


def in_place(x: Any, result: Any) -> bool:
    return result is x if x.flags.writeable else result is not x


def check_collectives(comm: Any, dtype: Any, made: Any) -> None:
    """Every sort of collective over `made(rank)`, which makes that rank's array anew."""
    rows = [np.asarray(made(r)).astype(dtype) for r in range(3)]
    x = made(comm.rank)
    total = comm.all_reduce(x)
    assert in_place(x, total)
    with np.errstate(all="ignore"):
        expected = fold_in_order("rank", [row.astype(np.float32).reshape(-1) for row in rows]).astype(dtype)
    assert np.asarray(total).astype(dtype).tobytes() == expected.tobytes(), "all_reduce"
    x = made(comm.rank)
    got = comm.broadcast(x, 1)
    assert comm.rank == 1 or in_place(x, got)
    assert bits(np.asarray(got).astype(dtype)) == bits(rows[1]), "broadcast"
    assert bits(comm.all_gather(made(comm.rank))) == bits(np.stack(rows)), "all_gather"
    out = np.zeros((3, *rows[0].shape), dtype).view(Tagged)
    assert comm.all_gather(made(comm.rank), out=out) is out
    assert bits(np.asarray(out)) == bits(np.stack(rows))
    if comm.rank == 0:
        comm.send(made(0), 2, timeout=5.0)
    if comm.rank == 2:
        x = made(2)
        got = comm.recv(x, 0, timeout=5.0)
        assert in_place(x, got)
        assert bits(np.asarray(got).astype(dtype)) == bits(rows[0]), "recv"


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_arrays(run_ranks, tmp_path, kind, layout):
    def body(comm: Any) -> bool:
        for dtype in (np.float32, np.float16):
            values = rank_distinct(3, 24, dtype)
            check_collectives(
                comm, dtype, lambda r, values=values: LAYOUTS[layout](KINDS[kind](values[r].reshape(SHAPE), tmp_path))
            )
        return True

    assert run_ranks(3, body) == [True] * 3


def test_an_array_of_no_dimensions(run_ranks):
    def body(comm: Any) -> Any:
        kinds = [np.array(comm.rank + 1.0), np.array(comm.rank + 1.0).view(Tagged), np.float32(comm.rank + 1)]
        sums = [comm.all_reduce(x) for x in kinds]
        assert all(np.ndim(s) == 0 for s in sums)
        return [float(s) for s in sums], comm.all_gather(np.array(comm.rank, np.int64).view(Tagged)).tolist()

    assert run_ranks(3, body) == [([6.0] * 3, [0, 1, 2])] * 3


REFUSED: dict[str, Any] = {
    "masked": (lambda: np.ma.masked_array(np.ones(3), mask=[1, 0, 0]), "mask.*filled"),
    "structured": (lambda: np.zeros(3, [("a", np.float32)]), "can't travel"),
    "records": (lambda: np.zeros(3, [("a", np.float32)]).view(np.recarray), "can't travel"),
    "objects": (lambda: np.array([1, "x"], object), "can't travel"),
    "text": (lambda: np.array(["x"]), "can't travel"),
    "dates": (lambda: np.array(["2026-01-01"], "datetime64[D]"), "can't travel"),
    "long double": (lambda: np.ones(3, np.longdouble), "can't travel"),
    "a list": (lambda: [1.0, 2.0], "numpy array"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta.*no values"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    "sparse": (lambda: torch.ones(3).to_sparse(), "to_dense"),
    "sparse rows": (lambda: torch.ones(3, 3).to_sparse_csr(), "to_dense"),
    "fake": (lambda: fake_tensor(), "fake.*no values"),
}


def fake_tensor() -> Any:
    with torch._subclasses.FakeTensorMode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_travel_is_refused_by_name_before_anything_is_sent(run_ranks, kind):
    make, words = REFUSED[kind]

    def body(comm: Any) -> Any:
        calls = {
            "all_reduce": comm.all_reduce,
            "reduce": comm.reduce,
            "reduce_scatter": comm.reduce_scatter,
            "broadcast": comm.broadcast,
            "all_gather": comm.all_gather,
            "gather": comm.gather,
            "all_to_all": comm.all_to_all,
            "send": lambda x: comm.send(x, 1 - comm.rank),
            "recv": lambda x: comm.recv(x, 1 - comm.rank),
            "coalesced": lambda x: comm.all_reduce_coalesced([np.ones(3), x]),
        }
        for call in calls.values():
            with pytest.raises(TypeError, match=words):
                call(make())
        with pytest.raises(TypeError, match=words):
            comm.all_gather(np.ones(3, np.float32), out=make())
        return comm.all_reduce(np.ones(2)).tolist()

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


def test_an_out_that_can_not_be_written_is_refused_before_anything_is_sent(run_ranks):
    class Fixed:
        """An immutable array of some library, as JAX's are."""

        def __init__(self, values: np.ndarray) -> None:
            self.values, self.dtype, self.shape = values, values.dtype, values.shape

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self.values.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return self.values.__dlpack_device__()

        def __array_namespace__(self, api_version: str | None = None) -> Any:
            return np

    def body(comm: Any) -> Any:
        mine = np.ones((2, 3), np.float32)
        for out_of in (read_only, Fixed):
            calls = [
                lambda out: comm.all_gather(mine, out=out(np.zeros((2, 2, 3), np.float32))),
                lambda out: comm.gather(mine, comm.rank, out=out(np.zeros((2, 2, 3), np.float32))),
                lambda out: comm.reduce_scatter(mine, out=out(np.zeros((1, 3), np.float32))),
                lambda out: comm.scatter(mine, comm.rank, out=out(np.zeros(3, np.float32))),
                lambda out: comm.all_to_all(mine, out=out(np.zeros((2, 3), np.float32))),
            ]
            for call in calls:
                with pytest.raises(TypeError, match=r"out can't be written"):
                    call(out_of)
        return comm.all_reduce(np.ones(2)).tolist()

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2
