"""Proves the order over units: whoever holds what, the ranks complete the one tree that the units alone fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from math import comb
from typing import Any

from hostring.arrays.fold import ORDERS, expression
from hostring.topologies.proof import NotCertified
from hostring.topologies.units import Tree, UnitFold


@dataclass
class UnitProof:
    """What was shown so far.

    Attributes:
        splits: ways to share units out over ranks, each in every order of ranks.
        n_slots: the most that a split needs.
    """

    splits: int = 0
    n_slots: int = 0

    def prove(self, n_units: int, max_ranks: int) -> None:
        """Every way to share `n_units` out over up to `max_ranks`, ranks that hold none included.

        A rank without units fills no slot. So where each slot is filled by one rank, such ranks and the order of ranks
        change nothing, and the split is proven once. Where the all-reduce itself may complete the tree, every place of
        such ranks is tried in every order.

        Raises:
            NotCertified: a split folds the units in another order.
        """
        for holders in range(1, min(max_ranks, n_units) + 1):
            for held in _shared_out(n_units, holders):
                fold = UnitFold(held)
                if any(len(spans) > 1 for spans in fold.slots):
                    self._prove_one(fold)
                    self.splits += sum(comb(n_ranks, holders) for n_ranks in range(holders, max_ranks + 1)) * len(
                        ORDERS
                    )
                    continue
                for n_ranks in range(holders, max_ranks + 1):
                    self._prove_places(held, n_ranks)

    def _prove_places(self, held: tuple[int, ...], n_ranks: int) -> None:
        for places in combinations(range(n_ranks), len(held)):
            shares = dict(zip(places, held, strict=True))
            for order in ORDERS:
                self._prove_one(UnitFold(tuple(shares.get(rank, 0) for rank in range(n_ranks)), order))
                self.splits += 1

    def _prove_one(self, fold: UnitFold) -> None:
        self.n_slots = max(self.n_slots, fold.n_slots)
        wanted = _declared(sum(fold.shares))
        for got in _results(fold):
            if got != wanted:
                who = f"units shared out as {fold.shares}, ranks in order {fold.order}"
                raise NotCertified(f"{who}: folded {got}, declared is {wanted}")


def _shared_out(n_units: int, holders: int) -> Iterator[tuple[int, ...]]:
    """All ways to share units out in order, at least one each."""
    for cuts in combinations(range(1, n_units), holders - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, n_units)))


@lru_cache(maxsize=64)
def _declared(n_units: int) -> Any:
    return _added(expression("tree", _symbols(0, n_units)))


def _symbols(first: int, stop: int) -> list[Any]:
    return [(unit,) for unit in range(first, stop)]


def _results(fold: UnitFold) -> Iterator[Any]:
    """The sums that result, of symbols: one for each way in which an element of the all-reduce may be folded."""
    ranks = range(len(fold.shares))
    brought: list[dict[int, Any]] = [{} for _ in range(fold.n_slots)]  # of each slot, by rank
    first = 0
    for rank, held in zip(ranks, fold.shares, strict=True):
        for slot, tree in fold.brings(rank):
            brought[slot][rank] = _put(tree, _symbols(first, first + held))
        first += held
    if any(not slot for slot in brought):
        raise NotCertified(f"units shared out as {fold.shares}: a slot is brought by no rank")
    for start in ranks if fold.order == "ring" and fold.by_ranks else (0,):
        yield _put(fold.completes, [_reduced(slot, fold.order, ranks, start) for slot in brought])


def _reduced(slot: dict[int, Any], order: str, ranks: range, start: int) -> Any:
    """What the all-reduce makes of one slot."""
    if len(slot) == 1:
        return next(iter(slot.values()))
    return _added(expression(order, [slot.get(rank) for rank in ranks], start))


def _put(tree: Tree, terms: Any) -> Any:
    return terms[tree] if isinstance(tree, int) else _sum(_put(tree[0], terms), _put(tree[1], terms))


def _added(node: Any) -> Any:
    """An expression whose pairs are made sums; None is -0.0."""
    return _sum(_added(node[0]), _added(node[1])) if isinstance(node, tuple) and len(node) == 2 else node


def _sum(left: Any, right: Any) -> Any:
    """The symbol (first unit, one sum, other sum): a sum of two has the same bits in both orders."""
    if left is None or right is None:
        return right if left is None else left
    return (left[0], left, right) if left[0] < right[0] else (right[0], right, left)
