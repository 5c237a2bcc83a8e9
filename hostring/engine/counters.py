"""Exact counts of what was moved, and where the time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from hostring.arrays.dtypes import Array
from hostring.engine.frames import HEADER_BYTES
from hostring.engine.program import Program
from hostring.engine.receiving import Pipe

PHASES: Final = ("stage", "wait", "transfer", "fold")
STAGE, WAIT, TRANSFER, FOLD = range(4)


@dataclass
class LinkCount:
    """Messages and payload bytes over one link. Each message has a header of 64 bytes besides."""

    messages_sent: int = 0
    payload_sent: int = 0
    messages_received: int = 0
    payload_received: int = 0


class Counters:
    """What one group has done since it was made.

    Attributes:
        calls: completed calls by collective.
        phases: seconds by phase, in the order of `PHASES`; see `seconds`.
    """

    def __init__(self, pipes: Mapping[int, Pipe]) -> None:
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.phases: list[float] = [0.0] * len(PHASES)
        self._pipes = pipes
        self._links: defaultdict[int, LinkCount] = defaultdict(LinkCount)
        self.programs: set[Program] = set()

    def harvest(self, programs: Iterable[Program] | None = None) -> None:
        """Turn the run counts of `programs` into traffic. Done when asked, so that a run costs one increment."""
        for program in list(self.programs if programs is None else programs):
            for peer, (a, b, c, d) in program.binding.moved().items():
                self.add(peer, a, b, c, d)

    def add(
        self, peer: int, messages_sent: int, payload_sent: int, messages_received: int, payload_received: int
    ) -> None:
        link = self._links[peer]
        link.messages_sent += messages_sent
        link.payload_sent += payload_sent
        link.messages_received += messages_received
        link.payload_received += payload_received

    def forget(self) -> None:
        """Start from zero, as if nothing had been done."""
        self.programs.clear()
        self.calls.clear()
        self._links.clear()
        self.phases[:] = [0.0] * len(PHASES)
        for pipe in self._pipes.values():
            pipe.waited = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """By phase.

        "stage" is copying and casting between the caller's arrays and host memory, "wait" is the time in which nothing
        came, "fold" is arithmetic, "transfer" is the rest of the collective.
        """
        return dict(zip(PHASES, self.phases, strict=True))

    @property
    def waited_for(self) -> dict[int, float]:
        """Seconds of "wait" by the rank that was waited for."""
        return {peer: pipe.waited for peer, pipe in self._pipes.items() if pipe.waited}

    @property
    def links(self) -> dict[int, LinkCount]:
        """By peer."""
        self.harvest()
        return dict(self._links)

    @property
    def payload_sent(self) -> int:
        """Payload bytes sent to all peers."""
        return sum(link.payload_sent for link in self.links.values())

    @property
    def payload_received(self) -> int:
        """Payload bytes received from all peers."""
        return sum(link.payload_received for link in self.links.values())

    @property
    def header_sent(self) -> int:
        """Header bytes sent to all peers."""
        return HEADER_BYTES * sum(link.messages_sent for link in self.links.values())

    def snapshot(self) -> dict[str, Any]:
        """All counts as plain, independent dicts, for JSON or for a difference later."""
        return {
            "calls": dict(self.calls),
            "payload_sent": self.payload_sent,
            "payload_received": self.payload_received,
            "header_sent": self.header_sent,
            "links": {peer: asdict(link) for peer, link in self.links.items()},
            "seconds": self.seconds,
            "waited_for": self.waited_for,
        }


def blamed(waits: Array) -> Array:
    """Seconds for which each rank kept others waiting. What two ranks waited for each other cancels.

    Args:
        waits: seconds that rank r waited for rank p, at [r, p]; shape (ranks, ranks).

    Returns:
        shape (ranks,).
    """
    seconds: Array = np.maximum(waits - waits.T, 0.0).sum(axis=0)
    return seconds
