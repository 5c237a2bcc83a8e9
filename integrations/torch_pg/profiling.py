"""Rows for torch's profiler: one for the caller, under c10d's name, and one for carrying the call out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

import hostring


class Name(NamedTuple):
    """What a call is called.

    Attributes:
        call: in hostring's messages.
        row: in a profile, on the caller's side, as c10d calls it.
    """

    call: str
    row: str


def enabled() -> bool:
    """Whether a profiler runs in this process."""
    return profiler._is_profiler_enabled  # noqa: SLF001 - torch's private name


def caller(name: Name) -> Any:
    """A context for the caller's side of a call."""
    return profiler.record_function(name.row)


def carried_out(name: Name, job: Callable[[], Any], *, queued: bool) -> Callable[[], Any]:
    """`job` with a row on the thread that carries it out, which only profiles of all threads show."""
    row = f"hostring:{name.call} carried out" if queued else f"hostring:{name.call}"

    def recorded() -> Any:
        with profiler.record_function(row):
            return job()

    return recorded


def until_done(name: Name, work: hostring.Work) -> None:
    """A row from now until `work` has ended, on whatever thread that is."""
    ended: torch.futures.Future[None] = torch.futures.Future()
    with profiler.record_function(f"hostring:{name.call}") as record:
        record._call_end_callbacks_on_future(ended)  # noqa: SLF001 - torch's private name
    work.add_done_callback(lambda _: ended.set_result(None))
