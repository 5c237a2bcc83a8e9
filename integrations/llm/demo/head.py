"""The head rank's role: it has the prompts, and keeps what came of them."""

from __future__ import annotations

from typing import Any

from hostring import HostringError
from hostring.integrations.llm.demo.loop import Tell
from hostring.integrations.llm.demo.prompts import Prompts
from hostring.integrations.llm.demo.rank_model import RankModel
from hostring.integrations.llm.demo.steps import ANSWER, CONTROLS, END, WAIT, Step
from hostring.integrations.llm.demo.turn import Turn
from hostring.integrations.llm.regroup import reason

NEW = "/new"
"""As a prompt in a chat: forget what was said."""

_HEARTBEAT_S = 1.0  # between two words to the others while there is no prompt


class Head:
    """The head rank's role in a `Loop`.

    Attributes:
        turns: all prompts that were begun.
    """

    def __init__(self, model: RankModel, tell: Tell, prompts: Prompts) -> None:
        self.turns: list[Turn] = []
        self._model, self._tell, self._prompts = model, tell, prompts
        self._asked = False
        self._turn: Turn | None = None  # to be answered, or under way
        self._controls_due = model.job.controls

    @property
    def last_measured(self) -> Turn | None:
        """The last prompt that was answered to the end, and on which every rank has reported."""
        return next((turn for turn in reversed(self.turns) if turn.reports), None)

    def next_step(self, fresh: bool) -> Step:
        try:
            if self._turn is None:
                self._turn = self._next_turn()
        except EOFError:
            measured = self.last_measured
            if self._controls_due and measured is not None:
                self._controls_due = False
                return Step(CONTROLS, ids=measured.ids)
            return Step(END)
        if self._turn is None:
            return Step(WAIT, more=True)
        return Step(ANSWER, self._prompts.more, fresh, self._turn.ids)

    def _next_turn(self) -> Turn | None:
        if self._prompts.interactive and not self._asked:
            self._tell("ask", None)
            self._asked = True
        prompt = self._prompts.next(min(_HEARTBEAT_S, self._model.comm.timeout / 4))
        self._asked = self._asked and prompt is None
        conversation = self._model.conversation
        if prompt is None or (prompt == NEW and conversation is not None):
            if prompt is not None and conversation is not None:
                conversation.restart()
                self._tell("restarted", None)
            return None
        try:
            return Turn(prompt, tuple(self._model.ids(prompt)))
        except ValueError as exc:  # text that can't be encoded, or that the template refuses
            if not self._model.job.several:
                raise
            self.turns.append(Turn(prompt, (), error=str(exc)))
            self._tell("refused", str(exc))
            return None

    def answer(self, step: Step) -> None:
        turn, model = self._turn, self._model
        assert turn is not None
        self.turns.append(turn)
        self._tell("prompt", self._shown(turn, step))

        def on_text(piece: str) -> None:
            turn.pieces.append(piece)
            self._tell("text", piece)

        found = model.answer(step.ids, warm_up=step.fresh, on_text=on_text, on_token=turn.tokens.append)
        turn.generation = found
        if model.conversation is not None:
            model.conversation.remember(turn.prompt, turn.ids, found)
        self._turn = None  # answered, even if a rank is lost before it has reported
        turn.reports = model.reports(found)
        if model.job.several:
            self._tell("answered", None)

    def _shown(self, turn: Turn, step: Step) -> dict[str, Any]:
        shown = {"text": turn.prompt, "continued": self._model.continued, "more": step.more}
        if self._model.job.several:
            shown["number"], shown["typed"] = len(self.turns), self._prompts.interactive
        return shown

    def refused(self, exc: ValueError) -> None:
        advice = "" if self._model.conversation is None else f"; {NEW} starts a new conversation"
        if self._turn is not None:
            self._turn.error, self._turn = str(exc), None
            self._tell("refused", f"{exc}{advice}")

    def lost(self, exc: HostringError, waits: bool) -> None:
        turn = self._turn if self.turns and self.turns[-1] is self._turn else None  # else it was not begun, and will be
        lost = {"rank": exc.rank, "reason": reason(exc)}
        if turn is not None:
            turn.lost, self._turn = lost, None
        self._tell("lost", {**lost, "tokens": None if turn is None else len(turn.tokens), "waits": waits})
