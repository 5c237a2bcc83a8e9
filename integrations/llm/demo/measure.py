"""One rank's whole run: all prompts, the controls, and the figures."""

from __future__ import annotations

import contextlib
from typing import Any

from hostring import Comm, HostringError
from hostring.integrations.llm.demo.figures import figures
from hostring.integrations.llm.demo.head import Head
from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.demo.loop import Follower, Loop, Tell
from hostring.integrations.llm.demo.prompts import Prompts
from hostring.integrations.llm.demo.rank_model import RankModel
from hostring.integrations.llm.request import HEAD_RANK

_STDIN = 0


def measure(job: Job, comm: Comm, tell: Tell, device: str = "cpu") -> dict[str, Any] | None:
    """Answer all prompts, run the controls, and compare. A collective: every rank calls it, and names its own device.

    Returns:
        all figures on the head rank, None elsewhere. They are those of the last prompt that was answered to the end.

    Raises:
        HostringError: this rank can't go on. The head rank raises it only before the first prompt; after that the
        figures
            hold what there is, and "error".
    """
    tell("stage", "loading")
    model = RankModel(job, comm, device)
    with contextlib.ExitStack() as groups:
        if comm.rank != HEAD_RANK:
            Loop(model, Follower(model), tell, groups).run()
            return None
        head = Head(model, tell, Prompts(job.prompts or model.default_prompts, _STDIN if job.chat else None))
        loop, error = Loop(model, head, tell, groups), None
        try:
            loop.run()
        except HostringError as exc:
            if not head.turns:
                raise
            error = str(exc)
            model.comm.abort(error)
        result = figures(model, head, loop.controls, error)
    tell("result", result)
    return result
