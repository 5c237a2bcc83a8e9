"""Arrays of all libraries: numpy's, torch's, whatever speaks DLPack, and devices that nobody has heard of."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import as_library, bits, fold_in_order, rank_distinct

import hostring
from hostring.arrays.adapter import Adapter
from hostring.arrays.dtypes import BY_NAME, NAMES
from hostring.arrays.staging import adapter_for

torch = pytest.importorskip("torch")

TORCH = [name for name in NAMES if hasattr(torch, name)]
TOPOLOGIES = [("mesh", "rank"), ("ring", "rank"), ("star", "rank"), ("tree", "tree")]


def layouts(x: Any) -> dict[str, Any]:
    """Tensors with the values of `x`, shape (4, 6), that are laid out in other ways."""
    wide = torch.zeros((8, 12), dtype=x.dtype)
    wide[::2, 1::2].copy_(x)
    return {
        "plain": x.clone(),
        "strided": wide[::2, 1::2],
        "transposed": x.t().contiguous().t(),
        "offset": torch.cat([x[:1], x])[1:],
        "a row of columns": torch.stack([x, x], 2)[..., 1],
    }


@pytest.mark.parametrize("name", TORCH)
def test_torch_dtypes_and_layouts(run_ranks, name):
    rows = [row.reshape(4, 6) for row in rank_distinct(2, 24, BY_NAME[name])]
    sums = [row.astype(np.float32) if "float" in name and row.itemsize <= 4 else row for row in rows]
    with np.errstate(all="ignore"):
        total = (sums[0] | sums[1] if name == "bool" else sums[0] + sums[1]).astype(BY_NAME[name])

    def body(comm):
        for kind, x in layouts(as_library(rows[comm.rank], "torch")).items():
            assert bits(comm.all_gather(x)) == bits(np.stack(rows)), kind
            assert comm.broadcast(x, 1) is x
            assert bits(x) == bits(rows[1]), kind
        for kind, x in layouts(as_library(rows[comm.rank], "torch")).items():
            assert comm.all_reduce(x) is x
            if not np.isnan(total.astype(np.complex128)).any():
                assert bits(x) == bits(total), kind
            assert x.dtype == getattr(torch, name)
        return True

    assert run_ranks(2, body) == [True, True]


def test_torch_tensors_that_are_not_plain_memory(run_ranks):
    z = [torch.complex(*(torch.from_numpy(r) for r in rank_distinct(2, 6, seed=s))) for s in range(2)]

    def body(comm):
        conjugate, imaginary = z[comm.rank].clone().conj(), z[comm.rank].clone().conj().imag
        assert conjugate.is_conj()
        assert imaginary.is_neg()
        mixed = conjugate if comm.rank == 0 else z[1].clone()
        assert torch.equal(comm.all_gather(conjugate), torch.stack([z[0].conj(), z[1].conj()]))
        comm.all_reduce(mixed)
        assert torch.equal(mixed, z[0].conj().resolve_conj() + z[1])
        gathered = comm.all_gather(imaginary)
        assert torch.equal(gathered, torch.stack([-z[0].imag, -z[1].imag]))
        comm.broadcast(imaginary, 1)
        assert torch.equal(imaginary, -z[1].imag)
        return True

    assert run_ranks(2, body) == [True, True]


def test_torch_tensors_of_autograd_and_inference(run_ranks):
    def body(comm):
        leaf = torch.full((5,), float(comm.rank + 1), requires_grad=True)
        assert comm.all_reduce(leaf) is leaf
        assert leaf.requires_grad
        parameter = torch.nn.Parameter(torch.full((2, 3), float(comm.rank + 1)).t())
        comm.broadcast(parameter, 2)
        out = torch.full((5,), 1.0) * leaf
        assert out.requires_grad
        gathered = comm.all_gather(out)
        assert not gathered.requires_grad
        with torch.inference_mode():
            inside = torch.full((4,), float(comm.rank + 1))
            comm.all_reduce(inside)
        comm.all_reduce(inside)
        with torch.inference_mode():
            strided = torch.full((4, 4), float(comm.rank + 1))[:, ::2]
        comm.all_reduce(strided)
        return leaf.tolist(), parameter.tolist(), gathered[0].tolist(), inside.tolist(), strided[0].tolist()

    expected = ([6.0] * 5, [[3.0, 3.0]] * 3, [6.0] * 5, [18.0] * 4, [6.0] * 2)
    assert run_ranks(3, body) == [expected] * 3


def test_torch_tensors_of_one_element_or_none(run_ranks):
    def body(comm):
        one = torch.as_strided(torch.full((9,), comm.rank + 1.0), (1, 1), (7, 3), 2)
        scalar = torch.tensor(comm.rank + 1, dtype=torch.bfloat16)
        none = torch.empty((0, 3), dtype=torch.float16)
        assert comm.all_reduce(none) is none
        gathered = comm.all_gather(scalar).tolist(), tuple(comm.all_gather(none).shape)
        return comm.all_reduce(one).item(), comm.all_reduce(scalar).item(), *gathered

    assert run_ranks(2, body) == [(3.0, 3.0, [1.0, 2.0], (2, 0, 3))] * 2


def test_results_are_of_the_kind_of_the_argument(run_ranks):
    def body(comm):
        x = torch.ones((2, 3), dtype=torch.bfloat16)
        results = [
            comm.all_gather(x),
            comm.reduce_scatter(x),
            comm.all_to_all(x),
            comm.scatter(x, out=torch.empty(3, dtype=x.dtype)),
        ]
        assert all(isinstance(r, torch.Tensor) and r.dtype == x.dtype for r in results)
        out = torch.empty((2, 2, 3), dtype=x.dtype)
        assert comm.all_gather(x, out=out) is out
        into = np.empty((2, 2, 3), ml_dtypes.bfloat16)
        assert comm.all_gather(x, out=into) is into, "an out of another library will do"
        return bits(out) == bits(into)

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)
def test_torch_and_numpy_round_alike(run_ranks, dtype):
    """To nearest, ties to even, within the range of the dtype. Beyond it libraries differ (see the contract)."""
    own = BY_NAME[dtype]
    largest = float(ml_dtypes.finfo(own).max)
    rng = np.random.default_rng(5)
    exact = (rng.standard_normal(4000) * 2.0 ** rng.integers(-20, 9, 4000)).clip(-largest, largest).astype(np.float32)
    ties = np.unique(exact.astype(own).astype(np.float32))
    values = np.concatenate([exact, (ties[1:] + ties[:-1]) / 2])  # and what lies right between two values of the dtype

    def body(comm):
        if comm.rank == 0:
            comm.broadcast(values.copy())
            return bits(values.astype(own))
        return bits(comm.broadcast(as_library(np.zeros(values.size, own), "torch" if comm.rank == 1 else "numpy")))

    first, second, third = run_ranks(3, body)
    assert first == second == third


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (3,), check_invariants=True),
            "to_dense",
        ),
        (lambda: torch.zeros(3, dtype=torch.complex32), "complex32"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
    ],
    ids=["sparse", "half complex", "quantised"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_tensors_that_can_not_travel_are_refused_up_front(run_ranks, make, words):
    def body(comm):
        for call in (comm.all_reduce, comm.broadcast, comm.all_gather, lambda x: comm.send(x, 1 - comm.rank)):
            with pytest.raises(TypeError, match=words):
                call(make())
        return comm.all_reduce(torch.ones(2)).tolist()

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


class Device:
    """Memory of a device that stands in for a GPU. The host reaches it only by copies, and its dtype is its own."""

    class dtype:  # "q12": fixed point with 12 binary places, which only the device knows
        pass

    def __init__(self, ticks: list[int]) -> None:
        self.shape = (len(ticks),)
        self._ticks = ticks
        self.copies = 0


class DeviceAdapter(Adapter):
    """The two methods that a device needs, and the name of a dtype that holds its values."""

    def dtype(self, x: Device) -> np.dtype:
        return np.dtype(np.float32)

    def stage(self, x: Device, host: np.ndarray) -> None:
        x.copies += 1
        host[...] = np.array(x._ticks, np.float64) / 4096

    def unstage(self, host: np.ndarray, x: Device, shape: tuple[int, ...] | None = None) -> Device:
        target = x if shape is None else Device([0] * int(np.prod(shape)))
        target._ticks = [round(float(v) * 4096) for v in host]
        target.shape = (len(host),) if shape is None else shape
        return target


@pytest.mark.parametrize(("topology", "order"), TOPOLOGIES)
def test_a_device_with_its_own_dtype_needs_two_methods(run_ranks, topology, order):
    """Device → host → wire → host → device, in a group with a torch rank of bfloat16 and a numpy rank of float16."""
    hostring.register_adapter(Device, DeviceAdapter())
    n_elements = 50
    ticks = [int(t) for t in np.random.default_rng(1).integers(-40000, 40000, n_elements)]
    others = [rank_distinct(3, n_elements, BY_NAME[name])[r] for r, name in ((1, "bfloat16"), (2, "float16"))]

    def body(comm):
        if comm.rank == 0:
            x = Device(list(ticks))
            assert comm.all_reduce(x) is x
            gathered, sent = comm.all_gather(Device(list(ticks))), comm.broadcast(Device(list(ticks)))
            return x._ticks, len(gathered._ticks), sent._ticks, x.copies
        x = as_library(others[comm.rank - 1], "torch" if comm.rank == 1 else "numpy")
        total = comm.all_reduce(x.clone() if comm.rank == 1 else x.copy())
        gathered, sent = comm.all_gather(x), comm.broadcast(x)
        return bits(total), bits(gathered[0]), bits(sent)

    results = run_ranks(3, body, topology=topology, order=order)
    rows = [(np.array(ticks) / 4096).astype(np.float32), *(row.astype(np.float32) for row in others)]
    total = fold_in_order(order, rows)
    assert results[0] == ([round(float(v) * 4096) for v in total], 3 * n_elements, ticks, 1)
    for rank, row in ((1, others[0]), (2, others[1])):
        assert results[rank] == (
            bits(total.astype(row.dtype)),
            bits(rows[0].astype(row.dtype)),
            bits(rows[0].astype(row.dtype)),
        )


def test_a_subclass_travels_like_its_base(run_ranks):
    class Tagged(np.ndarray):
        pass

    def body(comm):
        x = np.full(4, comm.rank + 1.0).view(Tagged)
        assert comm.all_reduce(x) is x
        return x.tolist(), type(adapter_for(x)) is type(adapter_for(np.zeros(1)))

    assert run_ranks(2, body) == [([3.0] * 4, True)] * 2


def test_what_is_staged_once_is_not_kept(run_ranks):
    """Large tensors that need a host copy, each of another size: their memory goes."""

    def body(comm):
        largest = 1 << 22
        for k in range(12):
            x = torch.ones((largest // 4 - 1000 * k, 2))[:, 0]
            if comm.rank == 0:
                comm.send(x, 1)
            else:
                comm.recv(x, 0)
            if k == 3:
                comm.barrier()
                gc.collect()
                tracemalloc.start()
        comm.barrier()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        comm.barrier()
        tracemalloc.stop()
        return held

    assert max(run_ranks(2, body)) < 3 * (1 << 22)
