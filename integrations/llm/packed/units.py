"""Sums in the order that the model fixes for its units; `hostring.UnitFold` says who brings what to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Tree: TypeAlias = "int | tuple[Tree, Tree]"  # a position in a list, or two subtrees


def folded(tree: Tree, terms: Sequence[npt.NDArray[np.float32]] | npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The sum of `terms`, in the order of `tree`."""
    if isinstance(tree, int):
        found: npt.NDArray[np.float32] = terms[tree]
        return found
    return folded(tree[0], terms) + folded(tree[1], terms)
