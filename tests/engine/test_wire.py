"""A group may ask for a narrower wire:
contributions of float32 are rounded to bfloat16, and folded in float32 all the same.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
from oracle import bits, fold_in_order, rank_distinct

import hostring
from hostring.bench.certify_links import certify_on_links
from hostring.errors import GroupClosedError, HandshakeError
from hostring.rendezvous import MemoryStore
from hostring.topologies.proof import NotCertified, combinations

BF16 = np.dtype(ml_dtypes.bfloat16)
ORDERS = [("mesh", "rank"), ("ring", "ring"), ("star", "rank"), ("tree", "tree")]


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16).astype(np.float32)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize(("topology", "order"), ORDERS)
@pytest.mark.parametrize("library", ["numpy", "torch", "torch, strided"])
def test_contributions_are_rounded_and_their_sum_is_not(run_ranks, topology, order, world_size, library):
    sizes = (1, 577, 5000, 300_001)
    rows = {n: rank_distinct(world_size, n) for n in sizes}
    assert any((rounded(row) != row).any() for row in rows[577])

    def calls(comm):
        assert comm.wire == "bfloat16"
        results = []
        for n in sizes:
            mine = rows[n][comm.rank].copy()
            if library == "numpy":
                results.append(comm.all_reduce(mine))
            elif library == "torch":
                results.append(comm.all_reduce(torch.from_numpy(mine)).numpy())
            else:
                strided = torch.stack([torch.from_numpy(mine)] * 2, 1)[:, 0]
                results.append(comm.all_reduce(strided).numpy().copy())
        return results

    for results in run_ranks(world_size, calls, topology=topology, order=order, wire="bfloat16"):
        for n, result in zip(sizes, results, strict=True):
            assert bits(result) == bits(fold_in_order(order, [rounded(row) for row in rows[n]])), f"{n} elements"


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_other_reductions_and_operators(run_ranks, world_size):
    rows = rank_distinct(world_size, 6 * world_size)
    narrow = [rounded(row) for row in rows]
    total = fold_in_order("rank", narrow)

    def calls(comm):
        mine = rows[comm.rank].copy()
        scattered = comm.reduce_scatter(mine)
        at_root = comm.reduce(mine, 1)
        left = mine.copy() if comm.rank != 1 else None
        average = comm.all_reduce(rows[comm.rank].copy(), "avg")
        largest = comm.all_reduce(rows[comm.rank].copy(), "max")
        gathered = comm.all_gather(rows[comm.rank])
        wide = comm.all_reduce(rows[comm.rank].astype(np.float64))
        return scattered, at_root, left, average, largest, gathered, wide

    for rank, result in enumerate(run_ranks(world_size, calls, wire="bfloat16")):
        scattered, at_root, left, average, largest, gathered, wide = result
        assert bits(scattered) == bits(total[6 * rank : 6 * rank + 6])
        if rank == 1:
            assert bits(at_root) == bits(total)
        else:
            assert bits(left) == bits(rows[rank]), "x of the others is left as it is"
        assert bits(average) == bits(total / np.float32(world_size))
        assert bits(largest) == bits(np.maximum.reduce(narrow))
        assert bits(gathered) == bits(np.stack(rows)), "what only moves is not rounded"
        assert bits(wide) == bits(fold_in_order("rank", [row.astype(np.float64) for row in rows]))


def test_other_dtypes_travel_in_their_own_bits(run_ranks):
    rows = [row.astype(np.float16) for row in rank_distinct(2, 1000)]

    def calls(comm):
        mine = rows[comm.rank] if comm.rank else rows[comm.rank].astype(np.float32)
        return comm.all_reduce(mine.copy())

    results = run_ranks(2, calls, wire="bfloat16")
    total = rounded(rows[0].astype(np.float32)) + rows[1].astype(np.float32)
    assert bits(results[0]) == bits(total)
    assert bits(results[1]) == bits(total.astype(np.float16))


def test_a_call_of_the_same_shape_does_not_carry_over(run_ranks):
    """A strided float16 tensor travels as float32, unrounded; the next call's float32 must not."""

    def calls(comm):
        strided = torch.ones(300, 2, dtype=torch.float16)[:, 0]
        comm.all_reduce(strided)
        return float(strided[0]), float(comm.all_reduce(np.full(300, 1 + 2**-10, np.float32))[0])

    assert run_ranks(2, calls, wire="bfloat16") == [(2.0, 2.0)] * 2


@pytest.mark.parametrize("n_elements", [5, 5000])
def test_a_signalling_nan_is_no_error(run_ranks, n_elements):
    bits_of_it = np.full(n_elements, 0x7F800001, np.uint32)

    def calls(comm):
        with np.errstate(all="raise"):
            return comm.all_reduce(bits_of_it.view(np.float32).copy() if comm.rank else np.ones(n_elements, np.float32))

    for result in run_ranks(2, calls, wire="bfloat16"):
        assert np.isnan(result).all()


@pytest.mark.parametrize("wire", ["bfloat16", "mxint8"])
def test_a_call_that_can_not_begin_rounds_nothing(run_ranks, wire):
    def calls(comm):
        x = np.full(100, 1 + 2**-20, np.float32)
        comm.close()
        for call in (comm.all_reduce, comm.reduce, lambda x: comm.reduce_scatter(x.reshape(2, 50))):
            with pytest.raises(GroupClosedError):
                call(x)
        return set(x.tolist())

    assert run_ranks(2, calls, wire=wire) == [{1 + 2**-20}] * 2


def test_half_the_bytes_between_two(run_ranks):
    def calls(comm):
        before = comm.counters.payload_sent
        comm.all_reduce(np.ones(4096, np.float32))
        return comm.counters.payload_sent - before, comm.expected_payload("all_reduce", 4096)

    assert run_ranks(2, calls, wire="bfloat16") == [(8192, 8192)] * 2
    assert run_ranks(2, calls) == [(16384, 16384)] * 2


def test_a_split_and_the_environment_keep_the_wire(run_ranks, monkeypatch):
    monkeypatch.setenv("HOSTRING_WIRE", "bfloat16")

    def calls(comm):
        with comm.split(0) as part:
            return part.wire, float(part.all_reduce(np.full(3, 1 + 2**-10, np.float32))[0])

    assert run_ranks(2, calls) == [("bfloat16", 2.0)] * 2


def test_ranks_must_agree_on_the_wire():
    store = MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        wires = ("bfloat16", "float32")
        starts = [
            pool.submit(hostring.init, r, 2, wire=wire, transport="memory", store=store, timeout=10.0)
            for r, wire in enumerate(wires)
        ]
        for start in starts:
            with pytest.raises(
                HandshakeError, match=r"wire='bfloat16'.*wire='float32'|wire='float32'.*wire='bfloat16'"
            ):
                start.result(20)


def test_an_unknown_wire_is_refused():
    with pytest.raises(ValueError, match="wire='int4' is unknown; use float32 or bfloat16"):
        hostring.init(wire="int4")


@pytest.mark.parametrize("combination", list(combinations()), ids="/".join)
def test_certified_on_links(combination):
    assert certify_on_links(*combination, 3, [0, 1, 100, 4097], 64, "memory", "bfloat16") == 12


def test_certify_finds_a_group_that_does_not_round(monkeypatch):
    monkeypatch.setattr("hostring.engine.session.Session.travels_as", lambda self, dtype: dtype)
    with pytest.raises(NotCertified, match="other bits"):
        certify_on_links("mesh", "one_shot", "rank", 2, [100], 64, "memory", "bfloat16")
