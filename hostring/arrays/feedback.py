"""Error feedback: what a lossy wire has cut off a contribution is added to the next one of the same tensor.

Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., arXiv:1901.09847.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hostring.arrays.casting import fresh
from hostring.arrays.dtypes import FLOAT32, Array


class Feedback:
    """What one tensor's contributions have lost on this rank so far. Give each tensor its own, on every call.

    A group that was rebuilt begins with nothing: the ranks that are gone took their part with them. Save `state_dict`
    with a checkpoint, and load it on the rank that saved it.

    Attributes:
        residual: flat, float32; None before the first call.
    """

    def __init__(self) -> None:
        self.residual: Array | None = None
        self._epoch: int | None = None  # of the group that it was used in last; None also after loading

    def of(self, n_elements: int, epoch: int) -> Array:
        """The residual for a contribution to a group of this epoch: zeros when there is none yet.

        Raises:
            ValueError: it belongs to a tensor of another size.
        """
        if self.residual is None or self._epoch not in (None, epoch):
            self.residual = np.zeros(n_elements, FLOAT32)
        if self.residual.size != n_elements:
            raise ValueError(
                f"feedback: this state is of a tensor of {self.residual.size} elements, x has {n_elements}; "
                f"use one Feedback for each tensor"
            )
        self._epoch = epoch
        return self.residual

    def state_dict(self) -> dict[str, Any]:
        """A copy of the residual, for a checkpoint."""
        return {"residual": None if self.residual is None else self.residual.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, in any group."""
        residual = state["residual"]
        array = None if residual is None else np.asarray(residual)
        self.residual = None if array is None else fresh(array, FLOAT32, (array.size,))
        self._epoch = None
