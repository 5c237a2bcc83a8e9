"""The loop of steps that every rank runs. One collective ends a step: candidates in, the next step's plan out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hostring import HostringError
from hostring.integrations.llm.regroup import recoverable, regrouped
from hostring.integrations.llm.request import HEAD_RANK
from hostring.integrations.llm.serve.rank_part import RankPart
from hostring.integrations.llm.serve.steps import (
    Admission,
    Brought,
    Plan,
    admissions_from_bytes,
    admissions_to_bytes,
    brought_of,
)


class Role(Protocol):
    """What differs between the head rank and the others."""

    def wait_for_work(self) -> None:
        """Until a step has something to do. Steps of the others wait in their decision meanwhile."""

    def decide(self, stacked: npt.NDArray[np.int32], brought: list[Brought]) -> Plan:
        """The next step, where this rank decides."""

    def admissions(self) -> list[Admission]:
        """What the last plan announced, where this rank decided it."""

    def reported(self, reports: list[dict[str, Any]]) -> None:
        """All ranks' reports have come, on the head rank."""

    def lost(self, exc: HostringError) -> None:
        """A rank was lost, and the group is going to be rebuilt. May raise what ends this rank."""

    def whole(self) -> None:
        """All ranks are together: for the first time, or again."""


class StepLoop:
    """One rank's loop.

    Args:
        part: this rank's part of the model. It moves to the new group when the group is rebuilt.
        patience: seconds to wait for a lost rank to come back.
        groups: takes the groups that are made here, to be closed with the rest.
    """

    def __init__(self, part: RankPart, role: Role, patience: float, groups: contextlib.ExitStack) -> None:
        self._part, self._role, self._patience, self._groups = part, role, patience, groups

    def run(self) -> None:
        """Compute what the head says until it says that this is the end. A collective: every rank calls it.

        Raises:
            HostringError: a rank was lost and did not come back, or its loss is none that one recovers from.
        """
        lost: HostringError | None = None
        while True:
            try:
                if lost is not None:
                    self._regroup(lost)
                comm = self._part.comm
                comm.barrier(timeout=max(comm.timeout, self._part.load_wait_s))
                self._role.whole()
                self._steps()
                return
            except HostringError as exc:
                if not recoverable(exc):
                    raise
                self._role.lost(exc)
                lost = exc

    def _regroup(self, lost: HostringError) -> None:
        rebuilt = regrouped(self._part.comm, lost, self._patience)
        self._groups.enter_context(rebuilt)
        self._part.move_to(rebuilt)

    def _steps(self) -> None:
        part, role, plan = self._part, self._role, Plan()
        window = part.window()
        is_head = part.comm.rank == HEAD_RANK
        while not plan.ends:
            mine = part.run(window.mine, window.oldest)
            if is_head and window.is_idle:
                role.wait_for_work()
            plan = _decided(part, mine, partial(role.decide, brought=brought_of(window.oldest)))
            if plan.admits:
                told = admissions_to_bytes(role.admissions()) if is_head else b""
                for admission in admissions_from_bytes(part.comm.broadcast_bytes(told, root=HEAD_RANK)):
                    part.admit(admission)
            window.push(part.prepare(plan.rows))
            if plan.reports:
                reports = part.comm.gather_bytes(json.dumps(part.report()).encode())
                if is_head:
                    role.reported([json.loads(report) for report in reports])


class Follower:
    """The role of every rank but the head: it does what it is told."""

    def wait_for_work(self) -> None:
        pass

    def decide(self, stacked: npt.NDArray[np.int32], brought: list[Brought]) -> Plan:
        raise AssertionError("only the head decides")

    def admissions(self) -> list[Admission]:
        return []

    def reported(self, reports: list[dict[str, Any]]) -> None:
        pass

    def lost(self, exc: HostringError) -> None:
        pass

    def whole(self) -> None:
        pass


def _decided(part: RankPart, mine: npt.NDArray[np.int32], decide: Callable[[npt.NDArray[np.int32]], Plan]) -> Plan:
    """One collective: what the ranks bring goes in, the head's plan comes out."""

    def choose(stacked: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        answer = np.zeros(part.plan_width, np.int32)
        decide(stacked).write(answer)
        return answer

    return Plan.read(part.comm.decide(mine, choose, HEAD_RANK, part.plan_width))
