"""all_reduce gives the declared fold, bit for bit, whatever the topology, variant, size, dtype of the others, or
arrival.
"""

from __future__ import annotations

import hashlib
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import COMBINATIONS, HELD, as_library, bits, fold_in_order, force, host, rank_distinct
from ranks import in_processes, in_threads

from hostring.arrays.dtypes import BY_NAME

SEGMENT = 4
SIZES = (0, 1, 2, 3, 5, 8, 9, 13, 33)  # nothing, fewer than ranks, odd, and around the borders of segments
RANK_ORDER = [pair for pair, orders in HELD.items() if "rank" in orders]
ORDERS = sorted({(topology, order) for topology, _, order in COMBINATIONS})


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize(("topology", "variant", "order"), COMBINATIONS)
def test_every_variant_folds_in_the_declared_order(run_ranks, topology, variant, order, world_size):
    rows = {n: rank_distinct(world_size, n) for n in SIZES}

    def reduce_all(comm):
        force(comm, variant, SEGMENT)
        return [comm.all_reduce(rows[n][comm.rank].copy()) for n in SIZES]

    for results in run_ranks(world_size, reduce_all, topology=topology, order=order):
        for n, result in zip(SIZES, results, strict=True):
            assert bits(result) == bits(fold_in_order(order, rows[n])), f"{n} elements"


def test_the_orders_really_give_different_bits():
    rows = rank_distinct(5, 100)
    assert len({bits(fold_in_order(order, rows)) for order in ("rank", "ring", "tree")}) == 3


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize(("topology", "order"), ORDERS)
def test_what_is_chosen_by_size_folds_in_the_declared_order(run_ranks, topology, order, world_size):
    sizes = (1, 1000, 4097, 8193, 100_003)
    rows = {n: rank_distinct(world_size, n) for n in sizes}
    for results in run_ranks(
        world_size,
        lambda comm: [comm.all_reduce(rows[n][comm.rank].copy()) for n in sizes],
        topology=topology,
        order=order,
    ):
        for n, result in zip(sizes, results, strict=True):
            assert bits(result) == bits(fold_in_order(order, rows[n])), f"{n} elements"


FLOATS = ("float16", "bfloat16", "float32")
CONTRIBUTORS = st.tuples(st.sampled_from(FLOATS), st.sampled_from(["numpy", "torch"]))


def mixed_sum(comm, kinds, n_elements, variant=None, delays=0):
    """What one rank brings is of its own dtype and library. Returns the bytes of its result."""
    if variant is not None:
        force(comm, variant, SEGMENT)
    dtype, library = kinds[comm.rank]
    wait = random.Random(delays + comm.rank)
    result = b""
    for n in (
        n_elements,
        n_elements + 1,
        n_elements,
    ):  # the third repeats the first, when the dtypes of the others are known
        if delays:
            time.sleep(wait.random() * 0.003)
        mine = rank_distinct(comm.world_size, n, BY_NAME[dtype], seed=n)[comm.rank]
        result += bits(comm.all_reduce(as_library(mine, library)))
    return result


def mixed_sum_expected(kinds, n_elements, order="rank"):
    n_ranks = len(kinds)
    results = [b""] * n_ranks
    for n in (n_elements, n_elements + 1, n_elements):
        rows = [
            rank_distinct(n_ranks, n, BY_NAME[dtype], seed=n)[r].astype(np.float32)
            for r, (dtype, _) in enumerate(kinds)
        ]
        total = fold_in_order(order, rows)
        with np.errstate(over="ignore"):
            results = [
                done + bits(total.astype(BY_NAME[dtype])) for done, (dtype, _) in zip(results, kinds, strict=True)
            ]
    return results


@settings(max_examples=12)
@given(
    kinds=st.lists(CONTRIBUTORS, min_size=2, max_size=8), n_elements=st.integers(0, 40), delays=st.integers(1, 1 << 30)
)
def test_one_hash_over_all_topologies_with_mixed_contributors(kinds, n_elements, delays):
    wanted = hashlib.sha256(b"".join(mixed_sum_expected(kinds, n_elements))).hexdigest()
    for topology, variant in RANK_ORDER:
        results = in_threads(
            len(kinds), lambda comm, v=variant: mixed_sum(comm, kinds, n_elements, v, delays), topology=topology
        )
        assert hashlib.sha256(b"".join(results)).hexdigest() == wanted, f"{topology}/{variant}"


@pytest.mark.parametrize(("topology", "order"), ORDERS)
def test_large_mixed_contributions(run_ranks, topology, order):
    kinds = [
        ("bfloat16", "torch"),
        ("float32", "numpy"),
        ("float16", "numpy"),
        ("float16", "torch"),
        ("float32", "torch"),
    ]
    n_elements = 70_001
    results = run_ranks(5, lambda comm: mixed_sum(comm, kinds, n_elements), topology=topology, order=order)
    assert results == mixed_sum_expected(kinds, n_elements, order)


KINDS = [("float16", "torch"), ("bfloat16", "numpy"), ("float32", "torch")]
TOPOLOGIES = ("mesh", "ring", "star")
IN_PROCESSES = (0, 1, 577, 30_000)


def mixed_sums_in_process(comm):
    hashes = []
    for topology in TOPOLOGIES:
        group = comm.split(0, topology=topology)
        hashes += [hashlib.sha256(mixed_sum(group, KINDS, n)).hexdigest() for n in IN_PROCESSES]
        group.close()
    return hashes


def test_one_hash_over_processes_and_tcp():
    expected = {n: mixed_sum_expected(KINDS, n) for n in IN_PROCESSES}
    wanted = [[hashlib.sha256(expected[n][r]).hexdigest() for n in IN_PROCESSES] * len(TOPOLOGIES) for r in range(3)]
    assert in_processes(3, mixed_sums_in_process) == [("ok", hashes) for hashes in wanted]


@pytest.mark.parametrize(("topology", "order"), [pair for pair in ORDERS if pair[1] != "ring"])
def test_a_row_alone_and_in_a_batch_have_the_same_bits(run_ranks, topology, order):
    """The "ring" order is left out: there the order of an element depends on its position, as documented."""
    width, world_size = 576, 3
    batch = [row.reshape(64, width) for row in rank_distinct(world_size, 64 * width)]

    def body(comm):
        whole = comm.all_reduce(batch[comm.rank].copy())
        alone = comm.all_reduce(batch[comm.rank][17].copy())
        few = comm.all_reduce(batch[comm.rank][17:20].copy())
        chosen = {comm.session.tuner.all_reduce(n, 4).variant for n in (width, 3 * width, 64 * width)}
        return bits(whole[17]), bits(alone), bits(few[0]), chosen

    expected = bits(fold_in_order(order, [b[17] for b in batch]))
    for whole, alone, few, chosen in run_ranks(world_size, body, topology=topology, order=order):
        assert whole == alone == few == expected
        if (topology, order) in {("mesh", "rank"), ("mesh", "tree"), ("ring", "rank")}:
            assert len(chosen) > 1, "sizes which pick different schedules, or this shows nothing"


def extremes(rng: np.random.Generator, n_elements: int) -> np.ndarray:
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7FC00123, 0x7F800001, 0xFFC00077], np.uint32).view(np.float32)
    others = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38, 1.5, -2.5], np.float32)
    return rng.choice(np.concatenate([nans, others, others]), n_elements)


def plain(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), np.float32(np.nan), x)


def least(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    smaller = (a < b) | ((a == b) & np.signbit(a)) | np.isnan(a)
    return np.where(np.isnan(b) | ~smaller, b, a)


@pytest.mark.parametrize("segment", [37, 1 << 20])
@pytest.mark.parametrize(("topology", "variant", "order"), COMBINATIONS)
def test_infinities_zeros_denormals_and_nans_have_the_same_bits_everywhere(
    run_ranks, topology, variant, order, segment
):
    world_size, n_elements = 4, 301
    rows = [extremes(np.random.default_rng(r), n_elements) for r in range(world_size)]
    with np.errstate(all="ignore"):
        expected = {
            "sum": plain(fold_in_order(order, rows)),
            "prod": plain(fold_in_order(order, rows, np.multiply)),
            "avg": plain(fold_in_order(order, rows) / np.float32(world_size)),
            "min": plain(fold_in_order(order, rows, least)),
            "max": plain(-fold_in_order(order, [-row for row in rows], least)),
        }

    def body(comm):
        force(comm, variant, segment)
        return [(op, comm.all_reduce(rows[comm.rank].copy(), op)) for op in expected for _ in range(2)]

    for results in run_ranks(world_size, body, topology=topology, order=order):
        for op, result in results:
            assert bits(result) == bits(expected[op]), op


@pytest.mark.parametrize("topology", ["mesh", "ring", "star"])
def test_a_sum_that_overflows_16_bits_becomes_inf_there_and_nowhere_else(run_ranks, topology):
    def body(comm):
        dtype = (np.float16, np.float32, np.float16)[comm.rank]
        return comm.all_reduce(np.full(50, 60000, dtype))

    for result in run_ranks(3, body, topology=topology):
        assert set(host(result).tolist()) == ({np.inf} if result.dtype == np.float16 else {180000.0})
