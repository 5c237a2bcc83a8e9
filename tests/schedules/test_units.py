"""The order over units: whoever holds what, the sums of the ranks complete the one tree that the units alone fix."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from ranks import in_threads

from hostring import Comm, UnitFold
from hostring.arrays.fold import ORDERS, expression
from hostring.topologies import units
from hostring.topologies.proof import NotCertified
from hostring.topologies.unit_proof import UnitProof
from hostring.topologies.units import NOTHING


def put(tree: Any, terms: Any) -> Any:
    return terms[tree] if isinstance(tree, int) else put(tree[0], terms) + put(tree[1], terms)


def test_the_proof_counts_every_split() -> None:
    proof = UnitProof()
    for n_units in range(1, 7):
        proof.prove(n_units, 4)
    every = [c for n in range(1, 5) for c in itertools.product(range(7), repeat=n) if 1 <= sum(c) <= 6]
    assert proof.splits == len(ORDERS) * len(every)


def test_a_rank_brings_what_it_holds_and_nothing_else() -> None:
    for shares in [(3, 0, 5), (1, 2), (7,), (0, 1, 1, 1), (5, 6, 5)]:
        fold = UnitFold(shares)
        for rank, held in enumerate(shares):
            assert [u for a, b in fold.slots[rank] for u in range(a, b)] == list(
                range(sum(shares[:rank]), sum(shares[:rank]) + held)
            )


@pytest.mark.parametrize(
    ("shares", "orders"),
    [
        ((3,), ORDERS),
        ((2, 1), ORDERS),
        ((0, 2, 0, 1), ORDERS),
        ((1, 1, 1), ("rank", "tree")),  # a ring folds some chunks as (1 + 2) + 0
        ((1, 1, 1, 1), ("tree",)),  # ((0 + 1) + 2) + 3 is not (0 + 1) + (2 + 3)
        ((1, 0, 1, 1), ("rank",)),  # as a tree of ranks: 0 + (2 + 3)
        ((1, 2), ()),  # rank 1 brings two subtrees
    ],
)
def test_the_all_reduce_completes_the_tree_where_it_adds_ranks_up_so(
    shares: tuple[int, ...], orders: tuple[str, ...]
) -> None:
    assert tuple(order for order in ORDERS if UnitFold(shares, order).by_ranks) == orders


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (1, 0, 1, 1), (3, 2, 3), (2, 1)], ids=str)
def test_ranks_of_a_live_group_get_the_bits_of_one_that_holds_all(shares: tuple[int, ...], order: str) -> None:
    n_units = sum(shares)
    terms = np.random.default_rng(0).standard_normal((n_units, 500)).astype(np.float32) * 1e3
    terms[:, :7] = -0.0
    alone = put(expression("tree", list(range(n_units))), terms)

    def body(comm: Comm) -> Any:
        fold, first = UnitFold(shares, order), sum(shares[: comm.rank])
        slots = np.full((fold.n_slots, 500), NOTHING, np.float32)
        for slot, tree in fold.brings(comm.rank):
            slots[slot] = put(tree, terms[first : first + shares[comm.rank]])
        return put(fold.completes, comm.all_reduce(slots))

    for got in in_threads(len(shares), body, order=order):
        assert got.tobytes() == alone.tobytes()


def test_another_tree_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_the_middle(span: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        middle = (span[0] + span[1]) // 2
        return (span[0], middle), (middle, span[1])

    monkeypatch.setattr(units, "halves", in_the_middle)
    units.subtrees.cache_clear(), units.whole_of.cache_clear()
    try:
        with pytest.raises(NotCertified, match=r"units shared out as \(3,\), ranks in order rank: folded .* declared"):
            UnitProof().prove(3, 2)
    finally:
        units.subtrees.cache_clear(), units.whole_of.cache_clear()


def test_ranks_that_complete_the_tree_in_another_order_are_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the all-reduce always folded in the order of ranks."""
    monkeypatch.setattr(UnitFold, "_folds_of_ranks", lambda fold: [expression("rank", range(len(fold.shares)))])
    with pytest.raises(NotCertified, match=r"ranks in order ring"):
        UnitProof().prove(4, 4)
