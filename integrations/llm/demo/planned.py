"""`--plan auto` in a group: its ranks are measured before they load, and all take the same shares."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.planning.wish import AUTO

if TYPE_CHECKING:
    import torch

    from hostring import Comm
    from hostring.integrations.llm.planning.choose import Choice


def plan_together(job: Job, comm: Comm, device: torch.device) -> Job:
    """`job` with shares, where the ranks are to find them. A collective then.

    Ranks that have shares already keep them, and tell them to one that came back.

    Raises:
        ValueError: a rank would slow the others down, or nothing fits; on every rank, before a weight is read.
    """
    if job.plan != AUTO:
        return job
    known = json.dumps([job.shares, job.planned]).encode() if job.shares else b""
    for told in comm.gather_bytes(known):
        if told:
            shares, about = json.loads(told)
            return replace(job, shares=tuple(map(tuple, shares)), planned=about)
    choice = measured(job, comm, device)
    if choice.left_out:
        one = choice.left_out[0]
        raise ValueError(
            f"rank {one.rank} ({one.name}) should not take part: {one.why}. Start the group without it, or give "
            "--plan even"
        )
    return with_shares(job, choice)


def measured(job: Job, comm: Comm, device: torch.device) -> Choice:
    """Measure all ranks and plan. A collective."""
    from hostring.integrations.llm.planning.live import plan_live

    return plan_live(comm, job.model, compute=job.compute, dtype=job.dtypes[comm.rank], device=device)


def with_shares(job: Job, choice: Choice) -> Job:
    """`job` with the shares of a choice."""
    from hostring.integrations.llm.planning.document import document

    told, plan = document(choice), choice.solution.plan
    about = json.dumps({"left_out": told["left_out"], "predicted": told["predicted"]})
    return replace(job, shares=(plan.kv_groups, plan.columns, plan.vocab), planned=about)
