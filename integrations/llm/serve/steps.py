"""What all ranks do in one step. The head decides it, and it travels in the answer that ends the step before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FROM_PROMPT = -1  # in place of a token: the row's tokens are the next ones of the prompt, which every rank has
_ADMITS, _REPORTS, _ENDS = 1, 2, 4
_HEADER = 2  # what a plan says before its rows: flags, and the number of rows
_ROW = 4  # what it says of a row, before the guesses: slot, positions, token, start


class Row(NamedTuple):
    """What one sequence feeds in a step.

    Attributes:
        slot: of its KV cache.
        positions: how many. token: the first of them, or FROM_PROMPT.
        start: positions of the cache that are right, where a token is fed. What comes after them is forgotten.
        guesses: the tokens after the first one, which this step checks.
    """

    slot: int
    positions: int
    token: int
    start: int = 0
    guesses: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
        rows: what is computed, in this order.
        admits: before that, the head sends `Admission`s. reports: after that, ranks tell what they did since the last
            report. ends: this is the end.
    """

    rows: tuple[Row, ...] = ()
    admits: bool = False
    reports: bool = False
    ends: bool = False

    def write(self, into: npt.NDArray[np.int32]) -> None:
        """Put it at the start of `into`, which is flat and holds at least `plan_width` numbers."""
        flags = _ADMITS * self.admits + _REPORTS * self.reports + _ENDS * self.ends
        numbers = [flags, len(self.rows)]
        for row in self.rows:
            numbers += (row.slot, row.positions, row.token, row.start, *row.guesses)
        into[: len(numbers)] = numbers

    @staticmethod
    def read(numbers: npt.NDArray[np.int32]) -> Plan:
        flags, n_rows = numbers[:_HEADER].tolist()
        found, at = [], _HEADER
        for _ in range(n_rows):
            slot, positions, token, start = numbers[at : at + _ROW].tolist()
            end = at + _ROW + (0 if token == FROM_PROMPT else positions - 1)
            found.append(Row(slot, positions, token, start, tuple(numbers[at + _ROW : end].tolist())))
            at = end
        return Plan(tuple(found), bool(flags & _ADMITS), bool(flags & _REPORTS), bool(flags & _ENDS))


class Feed(NamedTuple):
    """A row with its tokens, as every rank knows it.

    Attributes:
        slot: of its KV cache. ids: the tokens.
        n_candidates: logits that each rank brings for a choice after them; 0 where nothing is chosen.
        keep: positions of the cache that stay, where others may be there; else None.
        choices: one after the last token, or one after each.
    """

    slot: int
    ids: Sequence[int]
    n_candidates: int
    keep: int | None = None
    choices: int = 1


@dataclass(frozen=True)
class Brought:
    """Where the candidates of one sequence stand in what a rank brings to a decision: `count` for each choice."""

    slot: int
    start: int
    count: int
    choices: int = 1

    @property
    def stop(self) -> int:
        return self.start + 2 * self.count * self.choices


def brought_of(feeds: Sequence[Feed]) -> list[Brought]:
    """What the ranks bring of a step."""
    found, start = list[Brought](), 0
    for feed in feeds:
        if feed.n_candidates:
            found.append(Brought(feed.slot, start, feed.n_candidates, feed.choices))
            start = found[-1].stop
    return found


def plan_width(streams: int, guesses: int = 0) -> int:
    """Numbers that any plan fits in, with so many guesses for each stream."""
    return _HEADER + (_ROW + guesses) * streams


@dataclass(frozen=True)
class Admission:
    """A sequence takes a slot, and with it what the slot's KV cache holds of an earlier one.

    Attributes:
        keep: positions of the cache that stay.
        ids: of the prompt after them.
        n_candidates: logits that each rank brings for a choice.
        every: logits are wanted after each position of the prompt, not only after the last.
    """

    slot: int
    keep: int
    ids: tuple[int, ...]
    n_candidates: int
    every: bool = False


def admissions_to_bytes(admissions: Sequence[Admission]) -> bytes:
    return json.dumps([asdict(admission) for admission in admissions]).encode()


def admissions_from_bytes(data: bytes) -> list[Admission]:
    found: list[dict[str, Any]] = json.loads(data)
    return [Admission(**{**fields, "ids": tuple(fields["ids"])}) for fields in found]
