"""`--plan auto` of the demo: processes that only measure, before those that run. A slow rank is not started again."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostring import HostringError
from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.demo.planned import measured, with_shares
from hostring.integrations.llm.planning.wish import AUTO
from hostring.launch.cores import pin
from hostring.launch.ranks import launch

PROGRAM = __name__ if __name__ != "__main__" else "hostring.integrations.llm.demo.probing"

_TASK = "HOSTRING_DEMO_PLANNING"


def plan_before(job: Job, env: dict[str, str]) -> tuple[Job, list[str]]:
    """`job` for those ranks of the demo that should take part, with their shares, and what is to be said about it.

    Args:
        env: for the processes that are measured.

    Raises:
        ValueError: nothing fits. HostringError: a rank failed while it was measured; what it said is on stderr.
    """
    if job.plan != AUTO:
        return job, []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "plan.json"
        task = json.dumps({"job": job.to_json(), "result": str(result)})
        code = launch(["-m", PROGRAM], job.ranks, env={**env, _TASK: task})
        if code or not result.exists():
            raise HostringError(f"the ranks ended with exit code {code} while they were measured; see their messages")
        told = json.loads(result.read_text(encoding="utf-8"))
    if "error" in told:
        raise ValueError(told["error"])
    return _kept(Job.from_json(told["job"]), told["kept"]), told["lines"]


def _kept(job: Job, ranks: Sequence[int]) -> Job:
    def only(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[rank] for rank in ranks) if values else ()

    return replace(job, dtypes=only(job.dtypes), devices=only(job.devices), compile=only(job.compile))


def rank_main() -> None:
    """What a rank process that is measured runs."""
    task = json.loads(os.environ.pop(_TASK))
    job, rank = Job.from_json(task["job"]), int(os.environ["RANK"])
    pin(rank, job.ranks)
    import torch

    import hostring
    from hostring.integrations.llm.model.devices import find_device
    from hostring.integrations.llm.planning.document import advice

    torch.set_num_threads(1)
    try:
        with hostring.init() as comm:
            choice = measured(job, comm, find_device(job.devices[rank]))
            said = list(advice(choice))
            told = {"job": with_shares(job, choice).to_json(), "kept": choice.kept, "lines": said}
    except hostring.HostringError as exc:
        sys.exit(f"hostring: rank {rank}: {exc}")
    except (ValueError, FileNotFoundError) as exc:
        told = {"error": str(exc)}
    if rank == 0:
        Path(task["result"]).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    rank_main()
