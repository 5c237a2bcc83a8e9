"""Training that exchanges parameters once in many steps: LocalSGD, and DiLoCo, whose outer steps have momentum.

Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019; Douillard et al., "DiLoCo: distributed
low-communication training of language models", arXiv:2311.08105.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from hostring.arrays.dtypes import FLOAT32, Array
from hostring.arrays.feedback import Feedback
from hostring.arrays.staging import adapter_for
from hostring.comm import Comm


class LocalSGD:
    """Parameters that each rank trains alone, and that all ranks bring together every `every` steps.

    An outer step averages over all ranks how far they moved since the last one, and moves all of them by it. With the
    defaults that is the average of the parameters; `rate=0.7, momentum=0.9` is DiLoCo. Between outer steps ranks have
    different parameters; after one, all ranks have the same bits.

        outer = LocalSGD(comm, model.parameters(), every=50, rate=0.7, momentum=0.9)
        for batch in mine:
            ...  # an inner step, as if this rank were alone
            outer.step()

    The group's wire rounds the averages' contributions, with error feedback. All arithmetic is numpy's, in float32.

    Args:
        comm: the group; after a `rebuild`, set `outer.comm` to the new one.
        parameters: arrays of any library that can be changed in place; the same values on all ranks.
        every: inner steps between two outer steps.
        rate: of the outer steps. momentum: of the outer steps, Nesterov's.

    Attributes:
        comm: the group. steps: inner steps so far. outer_steps: outer steps so far.

    Raises:
        ValueError: `every`, `rate` or `momentum` is out of range. TypeError: a parameter can't be changed in place.
    """

    def __init__(
        self, comm: Comm, parameters: Iterable[Any], *, every: int, rate: float = 1.0, momentum: float = 0.0
    ) -> None:
        if every < 1 or not rate > 0 or not 0 <= momentum < 1:
            raise ValueError(
                f"LocalSGD: every={every}, rate={rate}, momentum={momentum}; "
                "use every >= 1, rate > 0, 0 <= momentum < 1"
            )
        self.comm = comm
        self._parameters = list(parameters)
        for x in self._parameters:
            if not adapter_for(x).writable(x):
                raise TypeError(f"LocalSGD changes parameters in place, and {type(x).__name__} can't be changed")
        self._every, self._rate, self._momentum = every, np.float32(rate), np.float32(momentum)
        ends = np.cumsum([math.prod(x.shape) for x in self._parameters])
        self._host = np.empty(ends[-1] if len(ends) else 0, FLOAT32)  # where parameters pass, one after the other
        self._pieces = np.split(self._host, ends[:-1])
        self._anchor = self._gathered().copy()
        self._velocity = np.zeros_like(self._anchor)
        self._feedback = Feedback()
        self.steps = self.outer_steps = 0

    def step(self) -> bool:
        """Call this after each inner step. Returns whether it was followed by an outer step."""
        self.steps += 1
        if self.steps % self._every:
            return False
        self.outer_step()
        return True

    def outer_step(self) -> None:
        """Bring the ranks together now. Every rank calls this at the same step.

        Raises:
            HostringError: the group failed. Parameters and outer state are as they were before the call.
        """
        moved = self._anchor - self._gathered()
        self.comm.all_reduce(moved, "avg", feedback=self._feedback)
        self._velocity = self._momentum * self._velocity + moved
        self._anchor = self._anchor - self._rate * (moved + self._momentum * self._velocity)
        self.outer_steps += 1
        self.reset()

    def reset(self) -> None:
        """Give the parameters the values that they had after the last outer step, on this rank."""
        np.copyto(self._host, self._anchor)
        for x, piece in zip(self._parameters, self._pieces, strict=False):
            adapter_for(x).unstage(piece, x)
        self.steps = self.outer_steps * self._every

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all ranks: for checkpoints, and for `share_state` with `outer_steps` as its step."""
        return {"anchor": self._anchor.copy(), "velocity": self._velocity.copy(), "outer_steps": self.outer_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the outer step at which `state_dict` was called: parameters, momentum and counts.

        Raises:
            ValueError: it is of other parameters.
        """
        anchor, velocity = (np.array(state[name], FLOAT32).reshape(-1) for name in ("anchor", "velocity"))
        if anchor.size != self._anchor.size:
            raise ValueError(
                f"LocalSGD: the state is of {anchor.size} parameters, these are {self._anchor.size}; load this model's"
            )
        self._anchor, self._velocity, self.outer_steps = anchor, velocity, int(state["outer_steps"])
        self.reset()

    def feedback_state(self) -> dict[str, Any]:
        """This rank's error feedback, for its own checkpoint: it differs between ranks."""
        return self._feedback.state_dict()

    def load_feedback_state(self, state: dict[str, Any]) -> None:
        """Go on with the feedback of this rank's checkpoint."""
        self._feedback.load_state_dict(state)

    def _gathered(self) -> Array:
        """The parameters one after the other, in host memory that the next call uses again."""
        for x, piece in zip(self._parameters, self._pieces, strict=False):
            adapter_for(x).stage(x, piece)
        return self._host
