"""The library inside an island, behind one face: a torch backend, or a second hostring group.

Methods take flat tensors on a device that the library serves, start the call, and return what waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d

import hostring
from hostring.integrations.torch_pg.device_streams import in_order

Tensor = torch.Tensor
MIN_POLL_S, MAX_POLL_S = 1e-5, 1e-3  # how long a rank sleeps before it looks again whether a library is done

_OPS = {
    "sum": c10d.ReduceOp.SUM,
    "min": c10d.ReduceOp.MIN,
    "max": c10d.ReduceOp.MAX,
    "prod": c10d.ReduceOp.PRODUCT,
}

_FOLDS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add, "min": torch.minimum, "max": torch.maximum, "prod": torch.mul,
}  # fmt: skip

Finish = Callable[[Callable[[], None], float], None]
"""Waits for a call: `finish(check, timeout)`. `check` is called now and then, and may raise."""


class Library(Protocol):
    """What islands need of a library.

    Attributes:
        name: as torch calls it.
        devices: types of the devices whose tensors it takes; empty when it takes all.
        sums_halves: whether 16-bit floats are reduced as they are; otherwise islands widen them to float32 before.
    """

    name: str
    devices: tuple[str, ...]
    sums_halves: bool

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> Finish: ...
    def all_gather(self, out: Tensor, x: Tensor) -> Finish: ...
    def broadcast(self, x: Tensor, root: int) -> Finish: ...
    def all_to_all(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Finish: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...


class TorchLibrary:
    """A backend of torch's. What it only moves, it moves as bytes, so it takes every dtype."""

    def __init__(self, name: str, backend: Any, devices: tuple[str, ...]) -> None:
        self.name, self.devices = name, devices
        self.sums_halves = "cpu" not in devices
        self._backend = backend

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> Finish:
        if self.name == "gloo":
            return self._exchanged_and_folded(out, x, op)
        options = c10d.ReduceScatterOptions()
        options.reduceOp = c10d.ReduceOp(_OPS[op])
        return self._begun(self._backend._reduce_scatter_base(out, x, options))  # noqa: SLF001 - torch's name for it

    def all_gather(self, out: Tensor, x: Tensor) -> Finish:
        gather = self._backend._allgather_base  # noqa: SLF001 - torch's name for it
        return self._begun(gather(_as_bytes(out), _as_bytes(x), c10d.AllgatherOptions()))

    def broadcast(self, x: Tensor, root: int) -> Finish:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self._begun(self._backend.broadcast([_as_bytes(x)], options))

    def all_to_all(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Finish:
        size = x.element_size()
        splits = [n * size for n in received], [n * size for n in sent]
        return self._begun(self._backend.alltoall_base(_as_bytes(out), _as_bytes(x), *splits, c10d.AllToAllOptions()))

    def abort(self, reason: str) -> None:
        """Nothing: waiting stops when `check` raises, and the library's own wait ends when its other ranks leave."""

    def close(self) -> None:
        self._backend.shutdown()

    def _exchanged_and_folded(self, out: Tensor, x: Tensor, op: str) -> Finish:
        """Gloo has no reduce-scatter of its own: it reduces all on each rank, and can't say when it is done."""
        contributions = torch.empty_like(x)
        arrived = self.all_to_all(contributions, x, (), ())

        def finish(check: Callable[[], None], timeout: float) -> None:
            arrived(check, timeout)
            first, *others = contributions.view(-1, out.numel())
            out.copy_(first)
            for other in others:
                _FOLDS[op](out, other, out=out)

        return finish

    def _begun(self, work: Any) -> Finish:
        def finish(check: Callable[[], None], timeout: float) -> None:
            deadline, pause = time.monotonic() + timeout, MIN_POLL_S
            while not work.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, MAX_POLL_S)
                if pause == MAX_POLL_S:
                    check()
                    if time.monotonic() > deadline:
                        raise hostring.OperationTimeout(
                            f"{self.name} inside an island was not done in {timeout:.1f} s; "
                            "raise the timeout if a rank is only slow"
                        )
            work.wait()

        return finish


class CommLibrary:
    """A second hostring group."""

    def __init__(self, comm: hostring.Comm) -> None:
        self.name, self.sums_halves = "hostring", False
        self.devices: tuple[str, ...] = ()
        self._comm = comm

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> Finish:
        return self._begun("reduce_scatter", lambda: self._comm.reduce_scatter(x, op, out=out), (x, out))

    def all_gather(self, out: Tensor, x: Tensor) -> Finish:
        return self._begun("all_gather", lambda: self._comm.all_gather(x, out=out), (x, out))

    def broadcast(self, x: Tensor, root: int) -> Finish:
        return self._begun("broadcast", lambda: self._comm.broadcast(x, root), (x,))

    def all_to_all(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Finish:
        def job() -> None:
            self._comm.all_to_all(x, send_counts=sent, recv_counts=received, out=out)

        return self._begun("all_to_all", job, (x, out))

    def abort(self, reason: str) -> None:
        self._comm.abort(reason)

    def close(self) -> None:
        self._comm.close()

    def _begun(self, what: str, job: Callable[[], Any], tensors: Sequence[Tensor]) -> Finish:
        work = self._comm.turn(in_order(job, tensors), what=what, async_op=True)
        return lambda check, timeout: work.wait(timeout)


def open_backend(name: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend of torch's for the ranks that meet in `store`."""
    if name == "gloo":
        return c10d.ProcessGroupGloo(store, rank, size, timeout)
    kind: Any = getattr(c10d, f"ProcessGroup{name.upper()}")
    options = kind.Options()
    options._timeout = timeout  # noqa: SLF001 - torch's name for it
    return kind(store, rank, size, options)


DEVICES = {"gloo": ("cpu",), "nccl": ("cuda",), "xccl": ("xpu",)}


def _as_bytes(x: Tensor) -> Tensor:
    # a tensor of one element may have any stride, and couldn't be viewed as bytes then
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
