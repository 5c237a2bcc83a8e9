"""Every rank gets the state of the rank that is furthest: after a start, and after a group was rebuilt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from hostring.arrays.dtypes import Array
from hostring.comm import Comm
from hostring.errors import HostringError
from hostring.training.packing import pack, unpack


def share_state(comm: Comm, state: Any, step: int, *, as_array: Callable[[Array], Any] = np.asarray) -> Any:
    """Agree on one state: that of the ranks with the highest `step`. Every rank calls this.

    Call it when a group starts, after `rebuild`, and on a rank that came back. The hashes of all states travel first,
    and the state itself only where a rank holds another one.

    Args:
        comm: the group.
        state: what `pack` takes: parameters, optimiser, step, ... None on a rank that has none yet.
        step: how far this rank is. A rank whose `state` is None has none, whatever it says.
        as_array: makes each array that was received, `torch.from_numpy` for example.

    Returns:
        None if this rank held that state already; otherwise the state to load, whose hash was checked.

    Raises:
        HostringError: two ranks are at the highest step and hold different states, no rank has a state, or what came
            has another hash than was announced. It is raised on every rank that can see it, and names the ranks.

    Cost: an all_gather, and a broadcast of the packed state if a rank lacks it.
    """
    packed = b"" if state is None else pack(state)
    mine = hashlib.sha256(packed).hexdigest()
    told = comm.gather_bytes(msgpack.packb([-1 if state is None else step, mine]))
    steps, hashes = zip(*(msgpack.unpackb(one) for one in told), strict=True)
    source = _furthest(steps, hashes)
    if all(one == hashes[source] for one in hashes):
        return None
    data = comm.broadcast_bytes(packed, source)
    if mine == hashes[source]:
        return None
    if (came := hashlib.sha256(data).hexdigest()) != hashes[source]:
        raise HostringError(
            f"rank {comm.rank} got a state of step {steps[source]} with sha256 {came} from rank {source}, which "
            f"announced {hashes[source]}; it is not used",
            source,
        )
    return unpack(data, as_array)


def _furthest(steps: tuple[int, ...], hashes: tuple[str, ...]) -> int:
    """The lowest rank with the highest step."""
    step = max(steps)
    if step < 0:
        raise HostringError("no rank has a training state to share; give one to at least one rank")
    ranks = [rank for rank, at in enumerate(steps) if at == step]
    if len({hashes[rank] for rank in ranks}) > 1:
        held = ", ".join(f"rank {rank} {hashes[rank][:16]}" for rank in ranks)
        raise HostringError(
            f"ranks at the same step {step} hold different states (sha256: {held}); begin them from one checkpoint"
        )
    return ranks[0]
