"""The head rank's role in the loop of steps: it passes on what happens, and keeps what people want to see of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import time
from typing import Any

import numpy as np
import numpy.typing as npt

from hostring import HostringError
from hostring.integrations.llm.regroup import reason
from hostring.integrations.llm.serve.scheduler import Scheduler
from hostring.integrations.llm.serve.steps import Admission, Brought, Plan

MAX_EVENTS = 100

Tell = Callable[[str, Any], None]
"""Called with what happens: ("lost", rank), ("whole", None)."""


@dataclass(frozen=True)
class Snapshot:
    """What all ranks had done at a moment.

    Attributes:
        at: seconds since 1970. reports: by rank, see `RankPart.report`.
        steps, generated: since the start.
    """

    at: float
    reports: list[dict[str, Any]]
    steps: int
    generated: int


class Cluster:
    """What the ranks last told, and what happened to them. HTTP threads read it.

    Attributes:
        snapshots: the last two.
        events: what happened, oldest first: "at" (seconds since 1970) and "text".
        lost: ranks that are missing now.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.snapshots: tuple[Snapshot, ...] = ()
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.lost: set[int] = set()

    def note(self, text: str) -> None:
        """This has happened."""
        self.events.append({"at": time(), "text": text})


class Head:
    """The head rank's role.

    Args:
        ready: called when all ranks are together for the first time.
        tell: see `Tell`.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster, ready: Callable[[], None], tell: Tell) -> None:
        self._scheduler, self._cluster, self._ready, self._tell = scheduler, cluster, ready, tell
        self._is_ready = False

    def wait_for_work(self) -> None:
        self._scheduler.wait_for_work()

    def decide(self, stacked: npt.NDArray[np.int32], brought: list[Brought]) -> Plan:
        return self._scheduler.decide(stacked, brought)

    def admissions(self) -> list[Admission]:
        return self._scheduler.admissions()

    def reported(self, reports: list[dict[str, Any]]) -> None:
        totals = self._scheduler.totals
        snapshot = Snapshot(time(), reports, totals.steps, totals.generated_tokens)
        self._cluster.snapshots = (*self._cluster.snapshots[-1:], snapshot)

    def lost(self, exc: HostringError) -> None:
        why = f"rank {exc.rank} is lost: {reason(exc)}"
        self._scheduler.broken(f"{why}; the group is being rebuilt")
        self._cluster.snapshots = self._cluster.snapshots[-1:]  # counters start anew in a rebuilt group
        self._cluster.lost.add(exc.rank or 0)
        self._cluster.note(why)
        self._tell("lost", exc.rank)

    def whole(self) -> None:
        again = bool(self._cluster.lost)
        self._cluster.lost.clear()
        self._cluster.note(f"all {self._cluster.world_size} ranks are together{' again' if again else ''}")
        self._tell("whole", None)
        self._scheduler.set_state("")
        if not self._is_ready:  # a rank may have been lost before all were together
            self._is_ready = True
            self._ready()
