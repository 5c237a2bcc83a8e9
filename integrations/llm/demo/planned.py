"""Before the ranks of a group load: planned shares must fit, and with `--plan auto` they are measured first."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.planning.fit import Need, check_fit, need_here
from hostring.integrations.llm.planning.footprint import Way
from hostring.integrations.llm.planning.wish import AUTO

if TYPE_CHECKING:
    import torch

    from hostring import Comm
    from hostring.integrations.llm.planning.choose import Choice


def plan_together(job: Job, comm: Comm, device: torch.device, loaded: bool = False) -> Job:
    """`job` with shares, where the ranks are to find them; planned shares must fit. A collective.

    Ranks that have shares already keep them, and tell them to one that came back.

    Args:
        loaded: this rank has its part of the model.

    Raises:
        ValueError: not all ranks were told to plan, a rank would slow the others down, or a share doesn't fit; on every
            rank, before a weight is read.
    """
    need = _need(job, comm.rank, device) if job.shares and not loaded else None
    mine = {"auto": job.plan == AUTO, "shares": job.shares, "planned": job.planned, "need": need and asdict(need)}
    told = [json.loads(one) for one in comm.gather_bytes(json.dumps(mine).encode())]
    for rank, one in enumerate(told):
        if one["auto"] != told[0]["auto"]:
            raise ValueError(f"rank {rank if one['auto'] else 0} was told --plan auto and others were not; tell all")
    check_fit([one["need"] and Need(**one["need"]) for one in told])
    if job.plan != AUTO:
        return job
    for one in told:
        if one["shares"]:
            return replace(job, shares=tuple(map(tuple, one["shares"])), planned=one["planned"])
    choice = measured(job, comm, device)
    if choice.left_out:
        left = choice.left_out[0]
        raise ValueError(
            f"rank {left.rank} ({left.name}) should not take part: {left.why}. Start the group without it, or give "
            "--plan even"
        )
    return with_shares(job, choice)


def _need(job: Job, rank: int, device: torch.device) -> Need:
    way = Way(job.compute, job.dtypes[rank], device.type)
    return need_here(job.model, ShardPlan(*job.shares), rank, way, device.index or 0)


def measured(job: Job, comm: Comm, device: torch.device) -> Choice:
    """Measure all ranks and plan. A collective."""
    from hostring.integrations.llm.planning.live import plan_live

    return plan_live(comm, job.model, compute=job.compute, dtype=job.dtypes[comm.rank], device=device)


def with_shares(job: Job, choice: Choice) -> Job:
    """`job` with the shares of a choice."""
    from hostring.integrations.llm.planning.document import document
    from hostring.integrations.llm.planning.plan_file import as_lists

    told, plan = document(choice), choice.solution.plan
    about = json.dumps({"left_out": told["left_out"], "predicted": told["predicted"]})
    return replace(job, shares=as_lists(plan), planned=about)
