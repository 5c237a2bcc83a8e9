"""How partial sums are made and folded so that the result doesn't depend on who holds what.

A region's row-parallel product is made per *unit* of its inputs: a KV-head group in attention, a run of FFN columns
in the MLP. The units are folded in one balanced binary tree that the model fixes; its left half is the largest power
of two below the count, as in hostring's order="tree". A rank holds a run of units. It folds them to the maximal
complete subtrees inside that run and brings one *slot* for each. The slots of all ranks complete the tree after they
are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Span: TypeAlias = tuple[int, int]  # units first … stop - 1
Tree: TypeAlias = "int | tuple[Tree, Tree]"  # a position in a list, or two subtrees


def halves(span: Span) -> tuple[Span, Span]:
    """The two subtrees of a span of two units or more."""
    first, stop = span
    middle = first + (1 << ((stop - first - 1).bit_length() - 1))
    return (first, middle), (middle, stop)


def subtrees(held: Span, tree: Span) -> list[Span]:
    """The maximal complete subtrees of `tree` inside `held`, in order."""
    first, stop = max(held[0], tree[0]), min(held[1], tree[1])
    if first >= stop:
        return []
    if (first, stop) == tree:
        return [tree]
    left, right = halves(tree)
    return [*subtrees(held, left), *subtrees(held, right)]


def fold_of(spans: Sequence[Span], tree: Span) -> Tree:
    """How adjacent subtrees that cover `tree` complete it, as positions in `spans`."""
    if tree in spans:
        return list(spans).index(tree)
    left, right = halves(tree)
    return fold_of(spans, left), fold_of(spans, right)


def folded(tree: Tree, terms: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The sum of `terms` along their first dimension, in the order of `tree`."""
    if isinstance(tree, int):
        found: npt.NDArray[np.float32] = terms[tree]
        return found
    return folded(tree[0], terms) + folded(tree[1], terms)


def slots_of(shares: Sequence[int]) -> list[list[Span]]:
    """The subtrees that each rank brings, when rank r holds `shares[r]` units, in order."""
    stops = list(accumulate(shares))
    whole = (0, stops[-1])
    return [subtrees((stop - n, stop), whole) for n, stop in zip(shares, stops, strict=True)]


def ranks_fold_it(slots: Sequence[Sequence[Span]]) -> bool:
    """Whether an all-reduce in the order of ranks completes the tree: no rank brings two subtrees, and the tree leans
    left."""
    present = [spans for spans in slots if spans]
    if any(len(spans) != 1 for spans in present):
        return False
    spans = [spans[0] for spans in present]
    serial: Tree = 0
    for n in range(1, len(spans)):
        serial = (serial, n)
    return fold_of(spans, (0, spans[-1][1])) == serial
