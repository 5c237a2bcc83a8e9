"""`share_state`: every rank gets the state of the furthest, with its hash checked, and disagreement is named."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import bits, rank_distinct

from hostring.comm import Comm
from hostring.errors import HostringError
from hostring.training import share_state


@pytest.mark.parametrize("steps", [(3, 3, 2), (0, 5, 5), (4, None, 4), (None, None, 0), (1, 2, 3)], ids=str)
def test_every_rank_gets_the_state_of_the_furthest(run_ranks, steps):
    rows = rank_distinct(10, 50)  # by step

    def calls(comm):
        step = steps[comm.rank]
        state = None if step is None else {"w": rows[step].copy(), "step": step}
        before = comm.counters.calls["broadcast"]
        got = share_state(comm, state, step or 0)
        again = share_state(comm, got or state, (got or state)["step"])
        return got, again, comm.counters.calls["broadcast"] - before

    furthest = max(step for step in steps if step is not None)
    for step, (got, again, broadcasts) in zip(steps, run_ranks(3, calls), strict=True):
        assert (got is None) == (step == furthest)
        if got is not None:
            assert got["step"] == furthest
            assert bits(got["w"]) == bits(rows[furthest])
        assert again is None
        assert broadcasts == 2, "its length and itself, and nothing when all ranks hold it"


def test_one_step_and_different_states_are_refused_on_all_ranks(run_ranks):
    def calls(comm):
        with pytest.raises(HostringError, match=r"same step 4 hold different states \(sha256: rank 0 .*, rank 2 .*\)"):
            share_state(comm, {"w": np.full(3, comm.rank, np.float32)}, 3 if comm.rank == 1 else 4)
        return float(comm.all_reduce(np.ones(1, np.float32))[0])

    assert run_ranks(3, calls) == [3.0] * 3


def test_no_state_at_all_is_refused(run_ranks):
    def calls(comm):
        with pytest.raises(HostringError, match="no rank has a training state"):
            share_state(comm, None, 0)

    run_ranks(2, calls)


def test_what_changed_on_its_way_is_not_used(run_ranks, monkeypatch):
    whole = Comm.broadcast_bytes
    monkeypatch.setattr(
        Comm, "broadcast_bytes", lambda self, data, root: whole(self, data, root)[:-1] + b"\0", raising=True
    )

    def calls(comm):
        if comm.rank == 1:
            return share_state(comm, {"w": np.ones(5, np.float32)}, 2)
        with pytest.raises(HostringError, match=r"rank 0 got a state of step 2 with sha256 .* from rank 1"):
            share_state(comm, None, 0)
        return None

    run_ranks(2, calls)
