"""Which steps are under way, at the head rank: what was fed, and for whom the logits are that come back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hostring.integrations.llm.serve.prefill import MAX_CHUNK
from hostring.integrations.llm.serve.sequence import Sequence
from hostring.integrations.llm.serve.steps import FROM_PROMPT, Row


@dataclass(frozen=True)
class Issued:
    """A step that was decided: its rows, and the sequences by slot. Another one may have the slot when it ends.

    Attributes:
        start: position of the first row that is of a prompt; 0 where none is.
    """

    rows: tuple[Row, ...] = ()
    sequences: dict[int, Sequence] = field(default_factory=dict)
    start: int = 0

    @property
    def positions(self) -> int:
        return sum(row.positions for row in self.rows)


class UnderWay:
    """As many steps as there are groups of texts, empty ones included; one for a model without stages.

    Attributes:
        groups: into which the texts that are written are divided.
    """

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self._turns = 0
        self._steps = deque([Issued()] * groups)

    @property
    def largest(self) -> Issued:
        """The one with most positions."""
        return max(self._steps, key=lambda issued: issued.positions)

    def end_of_oldest(self) -> Issued:
        """Its logits have come. Another one is to be issued."""
        return self._steps.popleft()

    def issue(self, rows: tuple[Row, ...], running: dict[int, Sequence]) -> None:
        """This is the next step."""
        self._turns += 1
        sequences = {row.slot: running[row.slot] for row in rows}
        for row in rows:
            sequence = sequences[row.slot]
            sequence.turn = self._turns
            ended = not sequence.prompt_left or sequence.scores_prompt
            sequence.awaited = row.token != FROM_PROMPT or ended
        starts = (sequences[row.slot].fed - row.positions for row in rows if row.token == FROM_PROMPT)
        self._steps.append(Issued(rows, sequences, next(starts, 0)))

    def forget(self) -> None:
        """The group failed: nothing comes back."""
        self._steps = deque([Issued()] * self.groups)

    @property
    def max_chunk(self) -> int:
        """Positions of a prompt in one step: so few that the stages work at the same time on a long prompt."""
        return MAX_CHUNK // (2 * self.groups if self.groups > 1 else 1)

    def group_size(self, texts: int) -> int:
        """Rows of each group, for so many texts that are written."""
        return -(-texts // self.groups)
