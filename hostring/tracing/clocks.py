"""How far the clocks of ranks are apart, measured from the calls that they recorded.

No rank can end an all_reduce before all ranks have begun it. So each such call says of each pair of ranks that the one
ended it after the other began it, in both directions, like the two halves of a ping. The least times between these
bound the difference of the two clocks: the middle of the bounds is the estimate, half their distance the uncertainty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hostring.arrays.dtypes import Array

COMPARED: Final = ("all_reduce", "all_gather", "barrier")


@dataclass(frozen=True)
class Clocks:
    """Seconds to add to each rank's times, and by how much that may be wrong; both relative to the first rank.

    Attributes:
        offsets, uncertainties: by rank, in the order of the records. An uncertainty is infinite without a common call.
        n_calls: how many calls were compared.
    """

    offsets: tuple[float, ...]
    uncertainties: tuple[float, ...]
    n_calls: int


def compare(records: Sequence[Sequence[dict[str, Any]]]) -> Clocks:
    """The clocks of ranks whose operations these are."""
    by_seq = [{row["seq"]: row for row in rows if _compares(row)} for rows in records]
    common = sorted(set.intersection(*(set(rows) for rows in by_seq))) if by_seq else []
    if not common:
        return Clocks((0.0,) * len(records), (0.0, *(float("inf"),) * (len(records) - 1)), 0)
    began = np.array([[rows[seq]["started"] for rows in by_seq] for seq in common])  # (calls, ranks)
    ended = began + np.array([[rows[seq]["seconds"] for rows in by_seq] for seq in common])
    origin = began[0, 0]  # small numbers keep more digits
    most = _least_widths(began - origin, ended - origin)
    offsets = (most[0] - most[:, 0]) / 2
    widths = (most[0] + most[:, 0]) / 2
    return Clocks(tuple(map(float, offsets)), tuple(map(float, widths)), len(common))


def _compares(row: dict[str, Any]) -> bool:
    return row["collective"] in COMPARED and (row["n_elements"] > 0 or row["collective"] == "barrier")


def _least_widths(began: Array, ended: Array) -> Array:
    """The most by which rank s must be set forward against rank r, at [r, s], shape (ranks, ranks).

    Args:
        began, ended: seconds, shape (calls, ranks).
    """
    most: Array = np.min(ended[:, :, None] - began[:, None, :], axis=0)
    np.fill_diagonal(most, 0.0)
    for via in range(len(most)):  # two ranks may be compared best through a third
        most = np.minimum(most, most[:, via, None] + most[None, via, :])
    return most


def shifted(documents: Sequence[dict[str, Any]], clocks: Clocks) -> list[dict[str, Any]]:
    """The records with all times on the first rank's clock."""
    moved = []
    for document, offset in zip(documents, itertools.chain(clocks.offsets), strict=True):
        rows = [{**row, "started": row["started"] + offset} for row in document["operations"]]
        moved.append({**document, "operations": rows})
    return moved
