"""The order over units: one balanced tree that a model fixes, whoever holds what, and for any number of ranks.

A *unit* is a piece of a sum that is always made as a whole, such as the product of one attention head. All units are
folded in one balanced binary tree whose left half is the largest power of two below the count, as in order="tree". A
rank holds a run of units. It folds them to the maximal complete subtrees inside that run, and brings each of them in a
*slot* of one all-reduce. What others would bring in that slot is -0.0, which changes no number and no zero. Every rank
then completes the tree from the slots. Where the order of the ranks is that of the tree, one slot is enough.

`hostring certify` proves this for every split (`unit_proof.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TypeAlias

from hostring.arrays.fold import expression

Span: TypeAlias = tuple[int, int]  # units first … stop - 1
Tree: TypeAlias = "int | tuple[Tree, Tree]"  # a position in a list, or two subtrees

NOTHING = -0.0
"""What a rank without a slot brings: x + -0.0 has the bits of x, of 0.0 and of -0.0 too."""


@dataclass(frozen=True)
class UnitFold:
    """How the sums of ranks that hold runs of units complete the tree over all units.

    Attributes:
        shares: how many units each rank holds, in order; 0 is allowed.
        order: in which the all-reduce folds ranks.
    """

    shares: tuple[int, ...]
    order: str = "rank"

    @cached_property
    def slots(self) -> list[tuple[Span, ...]]:
        """The subtrees that each rank brings."""
        stops = list(accumulate(self.shares))
        return [subtrees((stop - n, stop), (0, stops[-1])) for n, stop in zip(self.shares, stops, strict=True)]

    @cached_property
    def by_ranks(self) -> bool:
        """Whether the all-reduce itself completes the tree: no rank brings two subtrees, and it adds them up so."""
        if any(len(spans) > 1 for spans in self.slots):
            return False
        present = {rank: spans[0] for rank, spans in enumerate(self.slots) if spans}
        wanted = _named(fold_of(list(present.values()), (0, sum(self.shares))), list(present))
        return all(_same(_among(fold, present.keys()), wanted) for fold in self._folds_of_ranks())

    @property
    def n_slots(self) -> int:
        """Slots of the all-reduce."""
        return 1 if self.by_ranks else sum(map(len, self.slots))

    @property
    def completes(self) -> Tree:
        """How the slots complete the tree, after the all-reduce."""
        return 0 if self.by_ranks else fold_of([span for spans in self.slots for span in spans], (0, sum(self.shares)))

    def brings(self, rank: int) -> list[tuple[int, Tree]]:
        """For each slot that `rank` fills, its number, and how the units that the rank holds make it."""
        before = 0 if self.by_ranks else sum(map(len, self.slots[:rank]))
        first = sum(self.shares[:rank])
        return [(before + n, whole_of(*span, first)) for n, span in enumerate(self.slots[rank])]

    def _folds_of_ranks(self) -> Iterator[Tree]:
        """The orders in which elements of an all-reduce are folded: "ring" begins each chunk at another rank."""
        ranks = range(len(self.shares))
        for start in ranks if self.order == "ring" else (0,):
            yield expression(self.order, ranks, start)


def halves(span: Span) -> tuple[Span, Span]:
    """The two subtrees of a span of two units or more."""
    first, stop = span
    middle = first + (1 << ((stop - first - 1).bit_length() - 1))
    return (first, middle), (middle, stop)


@lru_cache(maxsize=4096)
def subtrees(held: Span, tree: Span) -> tuple[Span, ...]:
    """The maximal complete subtrees of `tree` inside `held`, in order."""
    first, stop = max(held[0], tree[0]), min(held[1], tree[1])
    if first >= stop:
        return ()
    if (first, stop) == tree:
        return (tree,)
    left, right = halves(tree)
    return (*subtrees(held, left), *subtrees(held, right))


def fold_of(spans: Sequence[Span], tree: Span) -> Tree:
    """How adjacent subtrees that cover `tree` complete it, as positions in `spans`."""
    positions = {span: n for n, span in enumerate(spans)}

    def made(span: Span) -> Tree:
        found = positions.get(span)
        if found is not None:
            return found
        left, right = halves(span)
        return made(left), made(right)

    return made(tree)


@lru_cache(maxsize=4096)
def whole_of(first: int, stop: int, held_from: int) -> Tree:
    """A subtree made of single units, as positions among the units that a rank holds."""
    if stop - first == 1:
        return first - held_from
    left, right = halves((first, stop))
    return whole_of(*left, held_from), whole_of(*right, held_from)


def _named(tree: Tree, names: Sequence[int]) -> Tree:
    return names[tree] if isinstance(tree, int) else (_named(tree[0], names), _named(tree[1], names))


def _among(tree: Tree, present: object) -> Tree | None:
    """`tree` without the leaves that bring nothing."""
    if isinstance(tree, int):
        return tree if tree in present else None  # type: ignore[operator]
    left, right = _among(tree[0], present), _among(tree[1], present)
    return left if right is None else right if left is None else (left, right)


def _same(one: Tree | None, other: Tree | None) -> bool:
    """Whether two folds give the same bits: a sum of two has the same in both orders."""
    if one == other:
        return True
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return False
    straight = _same(one[0], other[0]) and _same(one[1], other[1])
    return straight or (_same(one[0], other[1]) and _same(one[1], other[0]))
