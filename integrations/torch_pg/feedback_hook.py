"""A communication hook for DDP: gradients are averaged over the group's lossy wire, with error feedback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

import hostring
from hostring.integrations.torch_pg.async_work import handle
from hostring.integrations.torch_pg.device_streams import in_order
from hostring.integrations.torch_pg.process_group import ProcessGroup


class FeedbackState:
    """What `feedback_hook` needs: one `hostring.Feedback` for each parameter, because DDP rearranges its buckets.

    Save `state_dict()` of each rank with its checkpoint.

    Args:
        parameters: all parameters of the model, in an order that a later process has too.
        group: a hostring group; None: the default group.

    Raises:
        TypeError: the group is of another backend.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], group: Any = None) -> None:
        group = torch.distributed.group.WORLD if group is None else group
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"feedback_hook needs a group of backend 'hostring', not {type(group).__name__}")
        self.comm: hostring.Comm = group.comm
        held = list(parameters)
        self._sizes = [p.numel() for p in held]
        self._numbers = {id(p): number for number, p in enumerate(held)}
        self._residuals = [np.zeros(size, np.float32) for size in self._sizes]

    def numbers(self, bucket: Any) -> list[int]:
        """The parameters of a bucket, in the order of its gradients."""
        return [self._numbers[id(p)] for p in bucket.parameters()]

    def take(self, numbers: list[int]) -> hostring.Feedback:
        """The feedback for gradients that lie one after the other."""
        joint = hostring.Feedback()
        joint.load_state_dict({"residual": np.concatenate([self._residuals[number] for number in numbers])})
        return joint

    def put(self, numbers: list[int], joint: hostring.Feedback) -> None:
        """Keep what `take` gave, after the call."""
        if joint.residual is not None:
            ends = np.cumsum([self._sizes[number] for number in numbers])[:-1]
            for number, part in zip(numbers, np.split(joint.residual, ends), strict=True):
                self._residuals[number] = part

    def state_dict(self) -> dict[str, Any]:
        """All residuals, for this rank's checkpoint."""
        return {"residuals": [residual.copy() for residual in self._residuals]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of this rank.

        Raises:
            ValueError: it is of other parameters.
        """
        sizes = [len(residual) for residual in state["residuals"]]
        if sizes != self._sizes:
            raise ValueError(f"feedback: the checkpoint is of parameters of {sizes} elements, these have {self._sizes}")
        self._residuals = [np.array(residual, np.float32) for residual in state["residuals"]]


def feedback_hook(state: FeedbackState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks: `net.register_comm_hook(FeedbackState(net.parameters()), feedback_hook)`."""
    gradients, numbers = bucket.buffer(), state.numbers(bucket)

    def average() -> None:
        joint = state.take(numbers)
        state.comm.all_reduce(gradients, "avg", feedback=joint)
        state.put(numbers, joint)

    work = state.comm.turn(in_order(average, [gradients]), what="all_reduce", async_op=True)
    future: torch.futures.Future[Any] = handle([gradients], work).get_future()
    return future.then(lambda done: done.value()[0])


feedback_hook.__annotations__.clear()  # DDP compares them with its own types, and these are strings
