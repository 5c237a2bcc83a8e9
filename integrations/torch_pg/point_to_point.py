"""Point to point: send and recv, alone and in the batch that `batch_isend_irecv` makes of several."""

from __future__ import annotations

import torch

from hostring.integrations.torch_pg.async_work import AllOf, CommWork, handle
from hostring.integrations.torch_pg.calls import Calls
from hostring.integrations.torch_pg.profiling import Name

Tensor = torch.Tensor

SEND = Name("send", "c10d::send")
RECV = Name("recv", "c10d::recv_")
RECV_ANY = Name("recv", "c10d::recv_any_source_")


class PointToPoint:
    def __init__(self, calls: Calls) -> None:
        self._calls, self._comm = calls, calls.comm

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> CommWork:
        (tensor,) = tensors
        return self._calls.queue(SEND, tensors, lambda: self._comm.send(tensor, dst, tag, async_op=True))

    def recv(self, tensors: list[Tensor], src: int | None, tag: int) -> CommWork:
        (tensor,) = tensors
        name = RECV_ANY if src is None else RECV
        return self._calls.queue(name, tensors, lambda: self._comm.recv(tensor, src, tag, async_op=True))

    def start_batch(self) -> None:
        """Collect the works of all calls until `end_batch`, for `batch_isend_irecv` and torch's coalescing manager."""
        self._calls.batch = []

    def end_batch(self) -> CommWork:
        """One work for all that was called since `start_batch`."""
        works, self._calls.batch = self._calls.batch, None
        return handle([], AllOf(works) if works else None)
