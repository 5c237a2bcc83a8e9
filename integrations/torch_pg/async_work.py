"""What asynchronous calls return to torch: works, and their futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

import hostring
from hostring.integrations.torch_pg.future_callbacks import run_callback

UNSET = timedelta(0)  # how torch says "no timeout" to a wait


def seconds(timeout: timedelta | None) -> float | None:
    """A timeout of torch's in seconds. None, the group's own, where torch leaves it unset: None, 0 or -1 ms."""
    if timeout is None or timeout <= UNSET:
        return None
    return timeout.total_seconds()


_Work: Any = c10d.Work


class CommWork(_Work):  # type: ignore[misc]
    """The handle of a call.

    Attributes:
        outputs: the tensors it writes, the value of its future.
        work: hostring's handle of it; None when it is done.
    """

    # a dict or an __init__ would each cost a call more than a microsecond
    __slots__ = ("_future", "outputs", "work")

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Wait for the end, and raise what the call raised."""
        if self.work is not None:
            self.work.wait(seconds(timeout))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None if self.work is None else self.work.exception()

    def result(self) -> Any:
        return self.outputs

    def source_rank(self) -> int:
        """The rank that sent what a receive got."""
        return getattr(self.work, "src", None) or 0

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future whose value is the list of output tensors."""
        future: torch.futures.Future[Any] | None = getattr(self, "_future", None)
        if future is None:
            future = self._future = self._then(self._value)
        return future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """A future of the outcome as a `WorkResult`. It never raises."""
        results: Any = c10d.WorkResult  # type: ignore[attr-defined,unused-ignore]
        future: torch.futures.Future[Any] = self._then(
            lambda: int(results.SUCCESS if self.exception() is None else results.COMM_ERROR)
        )
        return future

    def _value(self) -> Any:
        error = self.exception()
        if error is not None:
            raise error
        return self.outputs

    def _then(self, value: Callable[[], Any]) -> Any:
        # `set_exception` would make torch's C++ side read the exception as the value, and crash
        base: torch.futures.Future[Any] = torch.futures.Future(devices=_devices(self.outputs))
        future = base.then(lambda _: value())
        if self.work is None or self.work.is_completed():
            base.set_result(None)
        else:
            self.work.add_done_callback(lambda _: run_callback(lambda: base.set_result(None)))
        return future


def handle(outputs: Any, work: hostring.Work | AllOf | None = None) -> CommWork:
    """A `CommWork`. Without `work` it is done."""
    made = CommWork()
    made.outputs, made.work = outputs, work
    return made


class AllOf:
    """Several works as one, for a `CommWork`."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, timeout: float | None = None) -> None:
        for work in self._works:
            work.wait(timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(self)` once, when the last of them has ended."""
        left = [len(self._works)]
        lock = threading.Lock()

        def one_less(_: Any) -> None:
            with lock:
                left[0] -= 1
                last = not left[0]
            if last:
                callback(self)

        for work in self._works:
            work.add_done_callback(one_less)


def _devices(outputs: Any) -> Any:
    """The devices for whose streams a future must keep the order of kernels that its callbacks queue."""
    flat = [t for x in outputs or [] for t in (x if isinstance(x, (list, tuple)) else [x])]
    return sorted({t.device for t in flat if t.device.type in ("cuda", "xpu")}, key=str) or None
