"""The head rank's role in the loop of steps: it passes on what happens, and keeps what people want to see of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import time
from typing import Any

import numpy as np
import numpy.typing as npt

from hostring import HostringError
from hostring.integrations.llm.regroup import reason
from hostring.integrations.llm.serve.rank_part import Brought
from hostring.integrations.llm.serve.scheduler import Scheduler
from hostring.integrations.llm.serve.steps import Admission, Plan

MAX_EVENTS = 100

Tell = Callable[[str, Any], None]
"""Called with what happens: ("lost", rank), ("whole", None)."""


class Cluster:
    """What the ranks last told, and what happened to them. HTTP threads read it.

    Attributes:
        reports: of each rank, the last one and the one before it.
        events: what happened, oldest first: "at" (seconds since 1970) and "text".
        lost: ranks that are missing now.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.reports: list[dict[str, Any]] = []
        self.reports_before: list[dict[str, Any]] = []
        self.reported_at = self.reported_before_at = 0.0
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.lost: set[int] = set()

    def note(self, text: str) -> None:
        """This has happened."""
        self.events.append({"at": time(), "text": text})

    def reported(self, reports: list[dict[str, Any]]) -> None:
        """All ranks have told what they did."""
        self.reports_before, self.reports = self.reports, reports
        self.reported_before_at, self.reported_at = self.reported_at, time()


class Head:
    """The head rank's role.

    Args:
        ready: called when all ranks are together for the first time.
        tell: see `Tell`.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster, ready: Callable[[], None], tell: Tell) -> None:
        self._scheduler, self._cluster, self._ready, self._tell = scheduler, cluster, ready, tell

    def wait_for_work(self) -> None:
        self._scheduler.wait_for_work()

    def decide(self, stacked: npt.NDArray[np.int32], plan: Plan, brought: list[Brought]) -> Plan:
        return self._scheduler.decide(stacked, plan, brought)

    def admissions(self) -> list[Admission]:
        return self._scheduler.admissions()

    def reported(self, reports: list[dict[str, Any]]) -> None:
        self._cluster.reported(reports)

    def lost(self, exc: HostringError) -> None:
        why = f"rank {exc.rank} is lost: {reason(exc)}"
        self._scheduler.broken(f"{why}; the group is being rebuilt")
        self._cluster.lost.add(exc.rank or 0)
        self._cluster.note(why)
        self._tell("lost", exc.rank)

    def whole(self) -> None:
        again = bool(self._cluster.lost)
        self._cluster.lost.clear()
        self._cluster.note(f"all {self._cluster.world_size} ranks are together{' again' if again else ''}")
        self._tell("whole", None)
        self._scheduler.set_state("")
        if not again:
            self._ready()
