"""From a whole model on each rank to one whose rows they divide."""

from __future__ import annotations

import json
import weakref

from hostring import Comm
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer
from hostring.integrations.llm.pipeline.staged import refuse_together
from hostring.integrations.llm.rows.forward import RowsForward
from hostring.integrations.llm.rows.plan import RowPlan


def check_rows(comm: Comm, plan: RowPlan, why_not: str = "") -> None:
    """A collective.

    Args:
        why_not: this rank can't take part; empty when it can.

    Raises:
        ValueError: a rank was given other shares, or can't take part; on every rank.
    """
    told = comm.gather_bytes(json.dumps(plan.shares).encode())
    if any(one != told[0] for one in told):
        raise ValueError("the ranks were given other shares of rows; give all ranks the same --plan")
    refuse_together(comm, why_not)


def divided_model(inner: LocalModel, comm: Comm, plan: RowPlan) -> LocalModel:
    """What a rank runs in a group that divides rows, made of the whole model that it holds.

    Args:
        inner: in a group of its own, which is closed with the model.
    """
    reducer = HiddenReducer(comm, inner.config.hidden_size, inner.reducer.audit)
    reducer.clock = inner.reducer.clock
    forward = RowsForward(inner, comm, plan, reducer)
    weakref.finalize(forward, inner.comm.close).atexit = False  # the process ends all its links then
    shares = ShardPlan.copies(inner.config, comm.world_size)
    return LocalModel(forward, inner.config, shares, comm, reducer, inner.max_seq, forward)
