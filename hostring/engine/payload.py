"""What a call sends, from its schedule alone: the numbers that certify and the benchmarks compare the counters with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hostring.arrays.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, DType, nbytes_of, wire_dtype
from hostring.engine.both_ways import in_halves, parts_of
from hostring.engine.reductions import splits_blocks
from hostring.engine.session import Session
from hostring.topologies.schedule import Schedule, split_evenly


def expected_payload(session: Session, collective: str, n_elements: int | Sequence[int], dtype: Any, root: int) -> int:
    """See `Comm.expected_payload`."""
    n = session.world_size
    if n == 1:
        return 0
    own = BY_NAME[dtype] if isinstance(dtype, str) else np.dtype(dtype)
    if collective == "decide":
        brought, chosen = (n_elements, n_elements) if isinstance(n_elements, int) else n_elements
        steps = (
            session.planner.schedule("gather", brought, (root, (brought,) * n), own),
            session.planner.schedule("broadcast", chosen, root, own),
        )
        return sum(_payload(schedule, own, own, own) for schedule in steps)
    if not isinstance(n_elements, int):  # shares of an all-gather, which are moved as they are
        shares = tuple(n_elements)
        return _payload(session.planner.schedule(collective, shares[session.rank], shares, own), own, own, own)
    wire = wire_dtype(own)
    if collective == "all_reduce" and wire == FLOAT32 and session.rounds_results and in_halves(session, n_elements):
        return _in_halves(session, n_elements, session.travels_as(own))
    if collective == "all_reduce":
        result = own if own in (FLOAT16, BFLOAT16) and not session.rounds else wire
        schedule = session.planner.all_reduce_schedule(n_elements, wire)
        return _payload(schedule, session.travels_as(own), wire, result)
    parts = tuple(stop - start for start, stop in split_evenly(n_elements, n))
    moved = own
    if collective in ("reduce", "reduce_scatter"):
        moved, own = wire, session.travels_as(own)
        if collective == "reduce_scatter" and splits_blocks(own, parts):
            own = wire
    detail = _detail(collective, n_elements, parts, root)
    return _payload(session.planner.schedule(collective, n_elements, detail, moved), own, moved, moved)


def _detail(collective: str, n_elements: int, parts: Sequence[int], root: int) -> Any:
    """The planner's `detail` of a movement or a reduction."""
    shares = (n_elements,) * len(parts)
    details: dict[str, Any] = {
        "reduce": root,
        "reduce_scatter": parts,
        "broadcast": root,
        "all_gather": shares,
        "gather": (root, shares),
        "scatter": (root, shares),
        "all_to_all": (parts,) * len(parts),
        "barrier": 0,
    }
    if collective not in details:
        raise ValueError(f"collective={collective!r} is unknown; use all_reduce, decide, {', '.join(details)}")
    return details[collective]


def _in_halves(session: Session, n_elements: int, own: DType) -> int:
    """Contributions to each rank's chunk, and the chunk's result to all."""
    parts = parts_of(session, n_elements)
    sizes = tuple(nbytes_of(n, session.travels_as(FLOAT32)) for n in parts)
    contributed = session.planner.schedule("reduce_scatter", n_elements, parts, FLOAT32)
    handed_out = session.planner.schedule("all_gather", sizes[session.rank], sizes, np.dtype(np.uint8))
    return _payload(contributed, own, FLOAT32, FLOAT32) + handed_out.sent_elements()


def _payload(schedule: Schedule, raw: DType, wire: DType, result: DType) -> int:
    sends = (send for round_ in schedule.rounds for send in round_.sends)
    return sum(nbytes_of(len(s.what), raw if s.raw else result if s.result else wire) for s in sends)
