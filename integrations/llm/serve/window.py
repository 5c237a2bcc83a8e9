"""The steps that are in a pipeline at the same time, as one rank sees them."""

from __future__ import annotations

from collections import deque

from hostring.integrations.llm.serve.steps import Feed

Step = tuple[Feed, ...]


class StepWindow:
    """The last `depth` steps that were decided.

    A decision is a collective, so all ranks go from one decision to the next together. Between two of them, stage s of
    S computes the step that is `s * depth // S` decisions old, and after that the ranks bring what belongs to the
    oldest step. So all stages compute at the same time, each another step, once `depth` is S. With a depth of 1 a step
    passes all stages between two decisions.

    Args:
        stage, stages: the place of this rank's layers.
    """

    def __init__(self, depth: int, stage: int, stages: int) -> None:
        self._lag = stage * depth // stages
        self._steps: deque[Step] = deque([()] * depth, maxlen=depth)

    @property
    def mine(self) -> Step:
        """What this rank computes now."""
        return self._steps[self._lag]

    @property
    def oldest(self) -> Step:
        """What the last stage computes now: the next decision gets its candidates."""
        return self._steps[-1]

    @property
    def is_idle(self) -> bool:
        return not any(self._steps)

    def push(self, step: Step) -> None:
        """This was decided."""
        self._steps.appendleft(step)
