"""Prompts answered one after the other by a group that is made whole again when a rank is lost.

The head rank has the prompts, and tells the others through the group what comes next, so that they need nothing but the
group. While there is no prompt it says so every second: that is how a rank that dies in the meantime is noticed.
"""

from __future__ import annotations

import contextlib
from time import monotonic
from typing import TYPE_CHECKING

from hostring import (
    CollectiveMismatch,
    Comm,
    GroupClosedError,
    HandshakeError,
    HostringError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
)
from hostring.integrations.llm.demo.prompts import Prompts
from hostring.integrations.llm.demo.turns import ANSWER, CONTROLS, END, WAIT, Message, Turn, share
from hostring.integrations.llm.generate import HEAD_RANK

if TYPE_CHECKING:
    from hostring.integrations.llm.demo.runs import Run, Tell

_HEARTBEAT = 1.0  # seconds between two words to the others while there is no prompt
_LOADING = 120.0  # seconds that ranks wait at least for those that still load: a short timeout is meant for steps
_MOST_LOSSES = 3  # in a row, without a prompt in between: whatever kills ranks, another try won't help
_FOR_GOOD = (CollectiveMismatch, GroupClosedError, HandshakeError, ProtocolError)


class Part:
    """One rank's part. This one follows; see `Head`.

    Args:
        run: this rank's model and group. The group is replaced when it is made whole again.
        groups: takes the groups that are made here, to be closed with the rest.
    """

    def __init__(self, run: Run, tell: Tell, groups: contextlib.ExitStack) -> None:
        self.run, self.tell = run, tell
        self._groups = groups
        self._more = run.job.several
        self._gathered = False
        self._fresh = True
        self._losses = 0

    def hold(self) -> None:
        """Do what the head says, until it says that this is the end. A collective: every rank calls it.

        Raises:
            HostringError: a rank was lost that could not be waited for, or did not come back.
            ValueError: the only prompt was refused.
        """
        while True:
            try:
                if not self._gathered:
                    self._gather()
                message = share(self.run.comm, self._next())
                if not self._obey(message):
                    return
            except HostringError as exc:
                self._recover(exc)

    def _gather(self) -> None:
        self.tell("stage", "ready")
        self.run.comm.barrier(timeout=max(self.run.comm.timeout, _LOADING))
        if self._losses:
            self.tell("whole", None)
        self._gathered = self._fresh = True

    def _next(self) -> Message | None:
        return None

    def _obey(self, message: Message) -> bool:
        """Whether there is anything after this."""
        self._more = message.more
        if message.what == ANSWER:
            self._losses, self._fresh = 0, False
            try:
                self._answer(message)
            except ValueError as exc:  # the same on every rank: too long a prompt, or numbers that are none
                self._refused(exc)
        elif message.what == CONTROLS:
            self.run.controls(message.ids)
        elif message.what == END:
            self.run.comm.barrier()
        return message.what != END

    def _answer(self, message: Message) -> None:
        self.run.generation(message.ids, warm_up=message.fresh)

    def _refused(self, exc: ValueError) -> None:
        if not self.run.job.several:
            raise exc

    def _recover(self, exc: HostringError) -> None:
        """Make the group whole again, or raise what says why that is not tried."""
        comm, job = self.run.comm, self.run.job
        if exc.rank == HEAD_RANK and comm.rank != HEAD_RANK:
            why = f"rank {HEAD_RANK}, the head, is lost ({reason(exc)}); it holds the prompts, so the run ends: start all ranks again"
            raise HostringError(why, HEAD_RANK) from exc
        if not self._waits(exc):
            raise exc
        self._losses += 1
        self.tell("stage", "rebuilding")
        try:
            again = _whole(comm, job.ranks, job.patience)
        except ValueError as cant:  # there is no store
            raise HostringError(f"{exc}; {cant}", exc.rank) from exc
        self._groups.enter_context(again)
        if again.world_size != job.ranks or (again.rank == HEAD_RANK) != (comm.rank == HEAD_RANK):
            who = f"{again.world_size} ranks came together, this as rank {again.rank}"
            raise HostringError(f"{who}; {job.ranks} are wanted, and this was rank {comm.rank}: was one started twice?")
        self.run.move_to(again)
        self._gathered = False

    def _waits(self, exc: HostringError) -> bool:
        """Whether the one who is lost may come back, and there is something to come back for."""
        tries = self._more and self._losses < _MOST_LOSSES and self.run.job.patience > 0
        return tries and exc.rank not in (None, HEAD_RANK) and not isinstance(exc, _FOR_GOOD)


class Head(Part):
    """The head rank's part.

    Attributes:
        turns: all prompts that were begun.
        error: why the run ended before the prompts did.
    """

    def __init__(self, run: Run, tell: Tell, groups: contextlib.ExitStack, prompts: Prompts) -> None:
        super().__init__(run, tell, groups)
        self.turns: list[Turn] = []
        self.error: str | None = None
        self._prompts = prompts
        self._asked = False
        self._turn: Turn | None = None  # to be answered, or under way
        self._uncontrolled = run.job.controls

    @property
    def last_complete(self) -> Turn | None:
        return next((turn for turn in reversed(self.turns) if turn.generation is not None), None)

    def hold(self) -> None:
        try:
            super().hold()
        except HostringError as exc:
            if not self.turns:
                raise
            self.error = str(exc)
            self.run.comm.abort(self.error)

    def _next(self) -> Message:
        try:
            if self._turn is None and (prompt := self._ask()) is not None:
                self._turn = Turn(prompt, tuple(self.run.ids(prompt)))
        except EOFError:
            measured = self.last_complete
            if self._uncontrolled and measured is not None:
                return Message(CONTROLS, ids=measured.ids)
            return Message(END)
        if self._turn is None:
            return Message(WAIT, more=True)
        return Message(ANSWER, self._prompts.more, self._fresh, self._turn.ids)

    def _ask(self) -> str | None:
        if self._prompts.interactive and not self._asked:
            self.tell("ask", None)
            self._asked = True
        prompt = self._prompts.next(min(_HEARTBEAT, self.run.comm.timeout / 4))
        self._asked = self._asked and prompt is None
        return prompt

    def _obey(self, message: Message) -> bool:
        if message.what == CONTROLS:
            self._uncontrolled = False
        return super()._obey(message)

    def _answer(self, message: Message) -> None:
        turn = self._turn
        assert turn is not None
        self.turns.append(turn)
        run = self.run
        shown = {"text": turn.prompt, "continued": run.continued, "more": message.more}
        if run.job.several:
            shown["number"], shown["typed"] = len(self.turns), self._prompts.interactive
        self.tell("prompt", shown)

        def on_text(piece: str) -> None:
            turn.pieces.append(piece)
            self.tell("text", piece)

        found = run.generation(message.ids, warm_up=message.fresh, on_text=on_text, on_token=turn.tokens.append)
        turn.generation, turn.reports = found
        self._turn = None
        if run.job.several:
            self.tell("answered", None)

    def _refused(self, exc: ValueError) -> None:
        super()._refused(exc)
        if self._turn is not None:
            self._turn.error, self._turn = str(exc), None
            self.tell("refused", str(exc))

    def _recover(self, exc: HostringError) -> None:
        turn = self._turn if self.turns and self.turns[-1] is self._turn else None  # else it was not begun, and will be
        lost = {"rank": exc.rank, "reason": reason(exc)}
        if turn is not None:
            turn.lost, self._turn = lost, None
        self.tell("lost", {**lost, "tokens": None if turn is None else len(turn.tokens), "waits": self._waits(exc)})
        super()._recover(exc)


def _whole(comm: Comm, ranks: int, patience: float) -> Comm:
    """`comm` with all its ranks again. One that dies while the links are made costs another attempt."""
    deadline = monotonic() + patience
    while True:
        try:
            return comm.rebuild(min_ranks=ranks, timeout=max(0.1, deadline - monotonic()))
        except RendezvousError:
            if monotonic() > deadline:
                raise


def reason(exc: HostringError) -> str:
    """What happened, without the words that say to whom."""
    return exc.reason if isinstance(exc, PeerLostError) else str(exc)
