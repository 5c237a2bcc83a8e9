"""A result goes to a rank in the 16 bits that its contribution came in:
the bits that it would have rounded to itself.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracle import as_library, bits, fold_in_order, force, rank_distinct

from hostring.arrays.dtypes import BY_NAME

VARIANTS = [("mesh", "mesh/two_shot", "rank"), ("mesh", "mesh/two_shot", "ring"), ("star", "stream", "rank")]
SAME = [("bfloat16",) * 3, ("float16",) * 3, ("float32",) * 3]
# The last for numpy alone: torch rounds float8 in a way of its own.
FIVE = ("bfloat16", "float16", "float32", "bfloat16", "float16")
MIXED = [
    ("bfloat16", "float16", "float32"),
    ("float32", "bfloat16", "bfloat16"),
    FIVE,
    ("float16", "float32", "float8_e5m2"),
]


def rows_of(kinds, n_elements):
    return [rank_distinct(len(kinds), n_elements, BY_NAME[kind])[rank] for rank, kind in enumerate(kinds)]


def check(results, kinds, n_elements, order, ufunc=np.add):
    total = fold_in_order(order, [row.astype(np.float32) for row in rows_of(kinds, n_elements)], ufunc)
    for kind, result in zip(kinds, results, strict=True):
        with np.errstate(over="ignore"):
            assert bits(result) == bits(total.astype(BY_NAME[kind]))


@pytest.mark.parametrize(
    ("kinds", "library"), [*((k, "numpy") for k in (*SAME, *MIXED)), *((k, "torch") for k in (*SAME, *MIXED[:3]))]
)
@pytest.mark.parametrize(("topology", "variant", "order"), VARIANTS)
@pytest.mark.parametrize("n_elements", [1, 2, 1000, 70_001])
def test_the_bits_are_those_of_rounding_at_home(run_ranks, topology, variant, order, kinds, library, n_elements):
    rows = rows_of(kinds, n_elements)

    def calls(comm):
        force(comm, variant, 4096)
        return [comm.all_reduce(as_library(rows[comm.rank].copy(), library)) for _ in range(3)]

    by_rank = run_ranks(len(kinds), calls, topology=topology, order=order)
    for k in range(3):
        check([results[k] for results in by_rank], kinds, n_elements, order)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_two_bytes_for_each_element_of_a_result(run_ranks, world_size):
    n_elements = 1000 * world_size

    def calls(comm):
        force(comm, "mesh/two_shot", 4096)
        x = np.ones(n_elements, np.float16)
        counted = []
        for op in ("sum", "max", "avg"):
            before = comm.counters.payload_sent
            comm.all_reduce(x.copy(), op)
            counted.append(comm.counters.payload_sent - before)
        return counted, comm.expected_payload("all_reduce", n_elements, "float16")

    part = 1000 * (world_size - 1)
    for counted, expected in run_ranks(world_size, calls):
        assert counted == [4 * part, 4 * part, 6 * part], (
            "an average is divided before it is rounded, and so travels as float32"
        )
        assert expected == 4 * part


def test_dtypes_that_change_from_call_to_call(run_ranks):
    plans = [*SAME, *MIXED[:2], ("bfloat16",) * 3, MIXED[1], ("float16",) * 3, MIXED[0]]

    def calls(comm):
        force(comm, "mesh/two_shot", 4096)
        return [comm.all_reduce(rows_of(kinds, 30_001)[comm.rank].copy()) for kinds in plans]

    by_rank = run_ranks(3, calls)
    for k, kinds in enumerate(plans):
        check([results[k] for results in by_rank], kinds, 30_001, "rank")


def test_a_group_with_a_narrow_wire_gets_its_results_in_float32(run_ranks):
    rows = rank_distinct(3, 3000)
    narrow = [row.astype(BY_NAME["bfloat16"]).astype(np.float32) for row in rows]

    def calls(comm):
        force(comm, "mesh/two_shot", 4096)
        return comm.all_reduce(rows[comm.rank].copy())

    for result in run_ranks(3, calls, wire="bfloat16"):
        assert bits(result) == bits(fold_in_order("rank", narrow))
