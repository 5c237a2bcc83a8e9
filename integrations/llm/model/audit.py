"""Evidence from inside a forward pass: what was reduced, whether it was used, and how long this rank computed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the demo's own process reads figures, and saves the seconds that torch takes to import
    from torch import Tensor


class StreamAudit:
    """Hashes the sums that a rank gets, and adds them up a second time beside the model.

    The residual stream is the embedding plus all sums, in f32, in order. A model that skips a reduction, or computes
    with
    something else than its result, ends a step with another stream than the one that is added up here.

    Args:
        reductions: how many sums there are in a step, between the embedding and the end.

    Attributes:
        wrong_steps: steps that ended with another stream, since the last restart.
        on_stage: called with "begin", "add", "end" and what those are called with, and with "restart" and None.
    """

    on_stage: Callable[[str, Tensor | None], None] | None = None

    def __init__(self, reductions: int) -> None:
        self._hash = hashlib.sha256()
        self._stream: npt.NDArray[np.float32] | None = None
        self._reductions, self._added = reductions, 0
        self.wrong_steps = 0

    def restart(self) -> None:
        """Forget what was noted so far."""
        self._hash, self._stream, self.wrong_steps = hashlib.sha256(), None, 0
        self._tell("restart", None)

    def begin(self, h: Tensor) -> None:
        """A step begins with this stream, of any shape."""
        self._stream = h.detach().cpu().numpy().astype(np.float32).ravel()  # a copy
        self._added = 0
        self._tell("begin", h)

    def add(self, sums: Tensor) -> None:
        """This was reduced."""
        values = sums.detach().cpu().numpy()
        self._hash.update(values.data)
        if self._stream is not None and values.size == self._stream.size:
            np.add(self._stream, values.ravel(), out=self._stream)
            self._added += 1
        self._tell("add", sums)

    def end(self, h: Tensor) -> None:
        """The step ends with this stream."""
        values = np.ascontiguousarray(h.detach().cpu().numpy())
        self._hash.update(values.data)
        same = self._stream is not None and np.array_equal(values.ravel(), self._stream, equal_nan=True)
        if not same or self._added != self._reductions:
            self.wrong_steps += 1
        self._stream = None
        self._tell("end", h)

    def _tell(self, kind: str, values: Tensor | None) -> None:
        if self.on_stage is not None:
            self.on_stage(kind, values)

    @property
    def sha256(self) -> str:
        """Hash of all sums and of all streams since the last restart, in order."""
        return self._hash.hexdigest()


class Clock:
    """Seconds for which it ran."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = perf_counter()

    def stop(self) -> None:
        """Does nothing when it does not run."""
        if self._since is not None:
            self.seconds += perf_counter() - self._since
            self._since = None
