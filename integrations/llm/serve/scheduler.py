"""Which sequences are computed in each step, at the head rank: from the requests of HTTP threads to plans of steps."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
import numpy.typing as npt

from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.serve.choosing import Logits
from hostring.integrations.llm.serve.guessing import Guessing
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.prefill import PrefillPace
from hostring.integrations.llm.serve.sequence import Sequence
from hostring.integrations.llm.serve.slots import KvSlots
from hostring.integrations.llm.serve.steps import FROM_PROMPT, Admission, Brought, Plan, Row
from hostring.integrations.llm.serve.text_request import Broken, Deliver, TextRequest
from hostring.integrations.llm.serve.under_way import UnderWay
from hostring.integrations.llm.speculation.speculator import Speculator

HEARTBEAT_S = 1.0  # between two steps while there is nothing to do, so that a rank that dies meanwhile is noticed
REPORT_S = 1.0  # between two reports of all ranks


class QueueFull(Exception):
    """No more sequences may wait."""


class Unavailable(Exception):
    """The group is not whole; the text says why."""


@dataclass
class Totals:
    """Counts since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ended: dict[str, int] = field(default_factory=dict)  # sequences, by how they ended


class Scheduler:
    """Requests in, plans of steps out.

    `submit` and `cancel` are for any thread. All else is for the thread of the steps.

    Attributes:
        why_not: why no request can be answered now; empty when they can.
        largest_shard: vocabulary rows of the rank that has most of them.
        max_seq: positions of each KV cache.

    Args:
        groups: of texts, whose steps are in a pipeline at the same time; see `StepWindow`.
        speculator: guesses tokens; None where nothing is guessed.

    Attributes:
        guessing: what came of guesses.
    """

    def __init__(
        self,
        options: ServeOptions,
        tokenizer: ChatTokenizer,
        largest_shard: int,
        max_seq: int,
        groups: int = 1,
        speculator: Speculator | None = None,
    ) -> None:
        self.why_not = "the ranks are loading"
        self.totals = Totals()
        self.largest_shard, self.max_seq = largest_shard, max_seq
        self._options, self._tokenizer = options, tokenizer
        self._slots = KvSlots(options.streams)
        self._pace = PrefillPace(options.step_limit_s)
        self._changed = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # by slot, in the order of admission
        self._under_way = UnderWay(groups)
        self.guessing = Guessing(speculator, max_seq)
        self._admissions: list[Admission] = []
        self._reported = self._step_began = monotonic()
        self._ending = self._some_cancelled = False

    # For any thread.

    @property
    def in_flight(self) -> tuple[int, int]:
        """Sequences that run, and that wait."""
        return len(self._running), len(self._waiting)

    def submit(self, requests: list[TextRequest], deliver: list[Deliver]) -> list[Sequence]:
        """Queue texts, all or none of them.

        Raises:
            QueueFull: too many wait already.
            Unavailable: the group is not whole.
        """
        made = [Sequence(request, self._tokenizer, to) for request, to in zip(requests, deliver, strict=True)]
        with self._changed:
            if self.why_not:
                raise Unavailable(self.why_not)
            free = self._options.streams - len(self._running)
            if len(self._waiting) + len(made) > self._options.queue + max(free, 0):
                raise QueueFull(
                    f"{len(self._running)} texts are written and {len(self._waiting)} wait; try again later"
                )
            self._waiting.extend(made)
            self._changed.notify()
        return made

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants this text any more; it is not part of the next step."""
        sequence.cancelled = self._some_cancelled = True
        with self._changed:
            self._changed.notify()

    def end(self) -> None:
        """Let all ranks end after the step that runs."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    # For the thread of the steps.

    def set_state(self, why_not: str) -> None:
        """Say why requests can't be answered, or that they can ("")."""
        with self._changed:
            self.why_not = why_not

    def wait_for_work(self) -> None:
        """Until there is something for a step to do, but no longer than to the next heartbeat."""
        with self._changed:
            if not self._running:
                self._changed.wait_for(lambda: bool(self._waiting) or self._ending, HEARTBEAT_S)
        self._step_began = monotonic()

    def decide(self, stacked: npt.NDArray[np.int32], brought: list[Brought]) -> Plan:
        """Take what the ranks brought of the oldest step under way, and say what the next one does.

        Args:
            stacked: shape (world_size, numbers).
        """
        now, slowest = monotonic(), self._under_way.largest
        if slowest.rows:
            self._pace.note(slowest.rows, now - self._step_began, slowest.start)
        self._step_began = now
        done = self._under_way.end_of_oldest()
        self.totals.steps += bool(done.rows)
        right = 0
        for part in brought:
            numbers = stacked[:, part.start : part.stop].reshape(len(stacked), part.choices, 2, part.count)
            right += self._accept(done.sequences[part.slot], [Logits.of(numbers[:, n]) for n in range(part.choices)])
        self.guessing.note(done.rows, done.sequences.values(), right)
        self._drop_cancelled()
        self._admit()
        reports = now - self._reported >= REPORT_S
        if reports:
            self._reported = now
        rows = self._rows()
        self._under_way.issue(rows, self._running)
        return Plan(rows, bool(self._admissions), reports, self._ending)

    def admissions(self) -> list[Admission]:
        """Those that the last plan announced."""
        found, self._admissions = self._admissions, []
        return found

    def broken(self, why: str) -> None:
        """The group failed: every text under way ends here, or waits to be replayed. Those that wait go on waiting."""
        with self._changed:
            self.why_not = why
            running, self._running, self._admissions = list(self._running.values()), {}, []
            if self._options.replay:
                self._waiting.extendleft(reversed(running))
        for sequence in running:
            self.guessing.forget(sequence)
            if self._options.replay:
                sequence.restart()
            else:
                self._count("broken")
                sequence.deliver(Broken(why))
        self._slots.forget()
        self._under_way.forget()

    def refuse_all(self, why: str) -> None:
        """This is the end: nothing that runs or waits will be answered."""
        self.broken(why)
        while self._waiting:
            self._waiting.popleft().deliver(Broken(why))

    def _accept(self, sequence: Sequence, logits: list[Logits]) -> int:
        """Take what came of a step. Returns how many guesses were right."""
        sequence.awaited = False
        if self._running.get(sequence.slot) is not sequence or sequence.cancelled:
            return 0
        before = len(sequence.tokens)
        goes_on = sequence.accept_all(logits)
        came = len(sequence.tokens) - before
        self.totals.generated_tokens += came
        if not goes_on:
            self._count("complete")
            self._release(sequence)
        return max(0, came - 1)

    def _drop_cancelled(self) -> None:
        if not self._some_cancelled:
            return
        self._some_cancelled = False
        for sequence in [s for s in self._running.values() if s.cancelled]:
            self._count("cancelled")
            self._release(sequence)
        with self._changed:
            gone = [s for s in self._waiting if s.cancelled]
            for sequence in gone:
                self._waiting.remove(sequence)
                self._count("cancelled")

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.slot]
        self.guessing.forget(sequence)
        self._slots.give_back(sequence.slot, sequence.ids)

    def _count(self, how: str) -> None:
        self.totals.ended[how] = self.totals.ended.get(how, 0) + 1

    def _admit(self) -> None:
        """Give free slots to those that wait longest."""
        with self._changed:
            while self._waiting and self._slots.free:
                sequence = self._waiting.popleft()
                slot, cached = self._slots.take(sequence.prompt)
                if sequence.scores_prompt:
                    cached = 0
                sequence.start(slot, cached)
                self._running[slot] = sequence
                self.totals.prompt_tokens += len(sequence.prompt)
                self.totals.cached_tokens += cached
                sequence.n_candidates = sequence.request.candidates(self.largest_shard)
                about = (sequence.n_candidates, sequence.scores_prompt)
                self._admissions.append(Admission(slot, cached, sequence.prompt[cached:], *about))

    def _rows(self) -> tuple[Row, ...]:
        """One row for each text of the group that has waited longest, and as much of the prompts as the pace allows,
        the oldest first. Chunks of a prompt may follow each other through the stages."""
        writing = [s for s in self._running.values() if not s.prompt_left]
        ready = sorted((s for s in writing if not s.awaited), key=lambda s: s.turn)
        group = ready[: self._under_way.group_size(len(writing))]
        reading = [s for s in self._running.values() if s.prompt_left and not s.awaited]
        depth = self.guessing.depth(group, bool(reading))
        rows = [self.guessing.row(s, depth) for s in group]
        start = reading[0].fed if reading else 0
        budget = min(self._pace.budget(len(group), start), self._under_way.max_chunk)
        for sequence in reading:
            count = min(sequence.prompt_left, budget, 1 if sequence.scores_prompt else budget)
            if count < 1:
                break
            sequence.fed += count
            budget -= count
            rows.append(Row(sequence.slot, count, FROM_PROMPT))
        return tuple(rows)
