"""The calls of all ranks side by side, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostring.arrays.dtypes import Array


@dataclass(frozen=True)
class Timeline:
    """The calls that all ranks recorded, oldest first.

    Attributes:
        ranks: in ascending order.
        rows: of each call, by rank in that order.
        began, ended, waited: seconds; shape (calls, ranks).
        blamed: the rank that each waited for longest, as an index into `ranks`, or -1; shape (calls, ranks).
    """

    ranks: tuple[int, ...]
    rows: list[list[dict[str, Any]]]
    began: Array
    ended: Array
    waited: Array
    blamed: Array

    @property
    def n_calls(self) -> int:
        return len(self.rows)

    def name(self, call: int) -> str:
        """What a call is called in messages."""
        row = self.rows[call][0]
        return f"{row['collective']} #{row['seq']}"


def side_by_side(documents: Sequence[dict[str, Any]]) -> Timeline:
    """The records of one group's ranks, whose times are on one clock. Calls that a rank didn't record are left out."""
    ordered = sorted(documents, key=lambda document: int(document["rank"]))
    ranks = tuple(int(document["rank"]) for document in ordered)
    by_seq = [{int(row["seq"]): row for row in document["operations"]} for document in ordered]
    common = sorted(set.intersection(*(set(rows) for rows in by_seq)))
    rows = [[of_rank[seq] for of_rank in by_seq] for seq in common]
    place = {rank: i for i, rank in enumerate(ranks)}
    began = _column(rows, lambda row: row["started"], len(ranks))
    return Timeline(
        ranks,
        rows,
        began,
        began + _column(rows, lambda row: row["seconds"], len(ranks)),
        _column(rows, lambda row: row["wait"], len(ranks)),
        _column(rows, lambda row: place.get(row["waited_for"], -1), len(ranks)).astype(int),
    )


def _column(rows: list[list[dict[str, Any]]], read: Any, n_ranks: int) -> Array:
    return np.array([[read(row) for row in call] for call in rows], np.float64).reshape(len(rows), n_ranks)
