"""Prompts answered one after the other by a group that is rebuilt when a rank is lost.

The head rank has the prompts, and tells the others through the group what comes next, so that they need nothing but the
group. While there is no prompt it tells them that every second, so that a rank that dies meanwhile is noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from hostring import HostringError
from hostring.integrations.llm.demo.controls import Controls
from hostring.integrations.llm.demo.rank_model import RankModel
from hostring.integrations.llm.demo.steps import ANSWER, CONTROLS, END, Step, share
from hostring.integrations.llm.regroup import reason, recoverable, regrouped
from hostring.integrations.llm.request import HEAD_RANK

Tell = Callable[[str, Any], None]
"""Called with what happens: ("stage", name), ("ask", None), ("prompt", what is shown of it), ("text", piece),
("answered", None), ("restarted", None), ("refused", why), ("lost", who and how), ("whole", None), ("result",
figures)."""

_LOAD_WAIT_S = 120.0  # how long ranks wait at least for those that still load: a short timeout is meant for steps
_COMPILE_WAIT_S = 900.0  # the same, where a rank compiles
_MAX_LOSSES = 3  # in a row, without a prompt in between: whatever kills ranks, another try won't help


class Role(Protocol):
    """What differs between the head rank and the others."""

    def next_step(self, fresh: bool) -> Step | None:
        """What comes next, where this rank decides. `fresh`: the ranks have just come together."""

    def answer(self, step: Step) -> None:
        """Take part in the answer to a prompt."""

    def refused(self, exc: ValueError) -> None:
        """The model refused the prompt, on every rank alike."""

    def lost(self, exc: HostringError, waits: bool) -> None:
        """A rank was lost. `waits`: the group is going to be rebuilt. May raise what ends the run."""


class Loop:
    """One rank's way through the prompts.

    Args:
        model: this rank's model and group. The group is replaced when it is rebuilt.
        role: the head rank's, or another's.
        tell: see `Tell`.
        groups: takes the groups that are made here, to be closed with the rest.
    """

    def __init__(self, model: RankModel, role: Role, tell: Tell, groups: contextlib.ExitStack) -> None:
        self.controls = Controls()
        self._model, self._role, self._tell = model, role, tell
        self._groups = groups
        self._more = model.job.several
        self._gathered = False
        self._fresh = True
        self._losses = 0

    def run(self) -> None:
        """Do what the head says, until it says that this is the end. A collective: every rank calls it.

        Raises:
            HostringError: a rank was lost, and did not come back or is not waited for.
            ValueError: the only prompt was refused.
        """
        while True:
            try:
                if not self._gathered:
                    self._gather()
                step = share(self._model.comm, self._role.next_step(self._fresh))
                self._do(step)
                if step.what == END:
                    return
            except HostringError as exc:
                self._recover(exc)

    def _gather(self) -> None:
        self._tell("stage", "ready")
        wait = _COMPILE_WAIT_S if self._model.job.compiles else _LOAD_WAIT_S
        self._model.comm.barrier(timeout=max(self._model.comm.timeout, wait))
        if self._losses:
            self._tell("whole", None)
        self._gathered = self._fresh = True

    def _do(self, step: Step) -> None:
        self._more = step.more
        if step.what == ANSWER:
            self._losses, self._fresh = 0, False
            try:
                self._role.answer(step)
            except ValueError as exc:  # the same on every rank: too long a prompt, or numbers that are none
                if not self._model.job.several:
                    raise
                self._role.refused(exc)
        elif step.what == CONTROLS:
            self._tell("stage", "controls")
            self.controls.run(self._model, step.ids)
        elif step.what == END:
            self._model.comm.barrier()

    def _recover(self, exc: HostringError) -> None:
        """Rebuild the group, or raise what says why that is not tried."""
        model = self._model
        waits = self._waits(exc)
        self._role.lost(exc, waits)
        if not waits:
            raise exc
        self._losses += 1
        self._tell("stage", "rebuilding")
        rebuilt = regrouped(model.comm, exc, model.job.patience)
        self._groups.enter_context(rebuilt)
        model.move_to(rebuilt)
        self._gathered = False

    def _waits(self, exc: HostringError) -> bool:
        """Whether the lost rank may come back, and prompts are left for it."""
        tries = self._more and self._losses < _MAX_LOSSES and self._model.job.patience > 0
        return tries and recoverable(exc)


class Follower:
    """The role of every rank but the head."""

    def __init__(self, model: RankModel) -> None:
        self._model = model

    def next_step(self, fresh: bool) -> None:
        return None

    def answer(self, step: Step) -> None:
        self._model.reports(self._model.answer(step.ids, warm_up=step.fresh))

    def refused(self, exc: ValueError) -> None:
        pass

    def lost(self, exc: HostringError, waits: bool) -> None:
        if exc.rank == HEAD_RANK:
            raise HostringError(
                f"rank {HEAD_RANK}, the head, is lost ({reason(exc)}); it holds the prompts, so the run ends: "
                "start all ranks again",
                HEAD_RANK,
            ) from exc
