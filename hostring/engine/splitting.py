"""A part of a group becomes a group with links of its own, and a failed group is formed anew."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from hostring.arrays.dtypes import Array
from hostring.engine.session import Session
from hostring.group.contract import contract, neighbours
from hostring.group.group import Group
from hostring.topologies.rules import read_rules


def color_and_key(session: Session, color: int | None, key: int | None, topology: str, order: str) -> Array:
    """What each rank tells the others before a split.

    Raises:
        ValueError: `color` is negative, or `topology` and `order` don't go together.
    """
    read_rules(topology, order)
    if color is not None and operator.index(color) < 0:
        raise ValueError(f"color={color} must be 0 or more, or None to join no group")
    return np.array([-1 if color is None else color, session.rank if key is None else key], np.int64)


def split(
    session: Session, colors: Any, topology: str, order: str, gather_bytes: Callable[[bytes], list[bytes]]
) -> Group | None:
    """The links of this rank's part; None where it joins none.

    Args:
        colors: by rank, what `color_and_key` returned there. gather_bytes: among all ranks of the session.
    """
    color = int(colors[session.rank][0])
    ranks = sorted(
        (r for r in range(session.world_size) if colors[r][0] == color), key=lambda r: (int(colors[r][1]), r)
    )
    if color < 0:
        gather_bytes(b"")
        return None

    def exchange(payload: bytes) -> list[bytes]:
        given = gather_bytes(payload)
        return [given[r] for r in ranks]

    return session.group.subgroup(
        f"{session.seq}.{color}",
        ranks,
        neighbours=neighbours(topology, order),
        contract=contract(topology, order, session.wire),
        exchange=exchange,
    )


def reform(session: Session, min_ranks: int, timeout: float | None) -> Group:
    """The links of a rebuilt group, with the same contract. The session is closed."""
    declared = contract(session.topology, session.order, session.wire)
    return session.reform(min_ranks, timeout, neighbours(session.topology, session.order), declared)
