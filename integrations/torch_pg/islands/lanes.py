"""Between islands: the lanes that this rank is in, each a hostring group of one rank from each island."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import hostring
from hostring.integrations.torch_pg.islands.faults import in_whole_group
from hostring.integrations.torch_pg.islands.layout import Lane

Tensor = torch.Tensor


@dataclass(frozen=True)
class Lanes:
    """The lanes of one rank.

    Attributes:
        lanes, comms: which they are, and the group of each.
        start, stop: this rank's share of a buffer, in units: all of its lanes' shares.
    """

    lanes: tuple[Lane, ...]
    comms: tuple[hostring.Comm, ...]

    @property
    def start(self) -> int:
        return self.lanes[0].start

    @property
    def stop(self) -> int:
        return self.lanes[-1].stop

    @property
    def payload_sent(self) -> int:
        """Payload bytes that this rank has sent to other islands."""
        return sum(comm.counters.payload_sent for comm in self.comms)

    def each(self, share: Tensor, call: Callable[[hostring.Comm, Tensor], Any]) -> None:
        """`call` for each lane, with its piece of this rank's share of a buffer."""
        unit = share.numel() // (self.stop - self.start)
        for lane, comm in zip(self.lanes, self.comms, strict=True):
            with self._blaming(lane):
                call(comm, share[(lane.start - self.start) * unit : (lane.stop - self.start) * unit])

    @contextmanager
    def only(self) -> Iterator[hostring.Comm]:
        """The group of this rank's only lane, where islands have one size."""
        with self._blaming(self.lanes[0]):
            yield self.comms[0]

    @contextmanager
    def _blaming(self, lane: Lane) -> Iterator[None]:
        try:
            yield
        except hostring.HostringError as exc:
            raise in_whole_group(exc, dict(enumerate(lane.ranks)), "between islands") from exc

    def abort(self, reason: str) -> None:
        for comm in self.comms:
            comm.abort(reason)

    def close(self) -> None:
        for comm in self.comms:
            comm.close()
