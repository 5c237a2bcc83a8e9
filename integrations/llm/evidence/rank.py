"""What one rank does for an evidence pack: every prompt length, the regions, and the controls."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hostring import Comm
from hostring.integrations.llm.demo.controls import Controls
from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.demo.rank_model import RankModel, gather
from hostring.integrations.llm.evidence.regions import measure_regions
from hostring.integrations.llm.planning.plan_file import shares_json
from hostring.integrations.llm.request import HEAD_RANK

PROGRAM = "hostring.integrations.llm.evidence.rank"
TOLD = "_EVIDENCE_TASK"  # the environment variable with a `Task`
REGION_STEPS = 16


@dataclass(frozen=True)
class Task:
    """What the ranks are to do.

    Attributes:
        lengths: tokens of each prompt. rounds: how often each is answered.
        text: what the prompts are made of, again and again.
        out: file for what was found.
    """

    job: str
    lengths: tuple[int, ...]
    rounds: int
    text: str
    out: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Task:
        fields = json.loads(text)
        return Task(**{**fields, "lengths": tuple(fields["lengths"])})


def run_rank(job: Job, comm: Comm, task: Task, device: str = "cpu") -> dict[str, Any] | None:
    """Answer every prompt `rounds` times, time the regions, run the controls. A collective.

    Returns:
        what was found, on the head rank; None elsewhere.
    """
    model = RankModel(job, comm, device)
    once = model.ids(task.text)
    prompts = [_repeated(once, length) for length in task.lengths]
    runs, last = [], None
    for ids in prompts:
        for number in range(task.rounds):
            found = model.answer(ids, warm_up=number == 0)
            reports = model.reports(found)
            runs.append({"length": len(ids), "tokens": found.tokens, "stats": found.stats.as_dict(), "ranks": reports})
            last = found, reports
    regions = gather(comm, measure_regions(model.model(comm, job.dtypes), prompts[-1], REGION_STEPS))
    shares = shares_json(model.plan)
    controls = Controls()
    controls.run(model, prompts[-1])
    if comm.rank != HEAD_RANK or last is None:
        return None
    return {
        "runs": runs,
        "prompts": prompts,
        "regions": regions,
        "controls": controls.beside(model, *last),
        "plan": {"source": model.job.plan, **shares},
        "planned": json.loads(model.job.planned) if model.job.planned else {},
        "group": {
            "ranks": comm.world_size,
            "topology": comm.topology,
            "order": comm.order,
            "wire": comm.wire,
            "transport": os.environ.get("HOSTRING_TRANSPORT", "auto"),
        },
    }


def _repeated(ids: Sequence[int], length: int) -> list[int]:
    return (list(ids) * (length // len(ids) + 1))[:length]


def main() -> None:
    """One rank process."""
    task = Task.from_json(os.environ.pop(TOLD))
    job, rank = Job.from_json(task.job), int(os.environ["RANK"])
    import torch

    import hostring
    from hostring.launch.cores import pin

    pin(rank, job.ranks)
    torch.set_num_threads(1)
    try:
        with hostring.init() as comm:
            found = run_rank(job, comm, task, job.devices[rank] if job.devices else "cpu")
    except (hostring.HostringError, ValueError, FileNotFoundError) as exc:
        sys.exit(f"hostring: rank {rank}: {exc}")
    if found is not None:
        Path(task.out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
