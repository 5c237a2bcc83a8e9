"""One rank's whole life: load, take steps, and, on the head rank, answer over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from hostring import Comm
from hostring.integrations.llm.request import HEAD_RANK
from hostring.integrations.llm.serve.head import Cluster, Head, Tell
from hostring.integrations.llm.serve.http.server import HttpServer
from hostring.integrations.llm.serve.http.service import Service
from hostring.integrations.llm.serve.loop import Follower, StepLoop
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.rank_part import RankPart
from hostring.integrations.llm.serve.scheduler import Scheduler


def serve_rank(
    options: ServeOptions,
    comm: Comm,
    device: str,
    *,
    tell: Tell | None = None,
    http_cores: Collection[int] | None = None,
) -> None:
    """Serve as one rank, until the process is interrupted. A collective: every rank calls it.

    Args:
        tell: told of losses, on the head rank.
        http_cores: where the head's HTTP thread may run; where this thread may when None.

    Raises:
        HostringError: a rank was lost and did not come back.
        OSError: the head can't listen.
        ValueError: the model can't be loaded.
    """
    with contextlib.ExitStack() as stack:
        if comm.rank != HEAD_RANK:
            StepLoop(RankPart(options, comm, device), Follower(), options.job.patience, stack).run()
            return
        server = HttpServer(options.host, options.port, http_cores)  # takes the port before anything is loaded
        stack.callback(server.close)
        part = RankPart(options, comm, device)
        model = part.model
        scheduler = Scheduler(options, model.tokenizer, max(model.sharded.plan.vocab), model.sharded.max_seq)
        cluster = Cluster(comm.world_size)
        stack.callback(scheduler.refuse_all, "the server is shutting down")
        server.start(Service(options, scheduler, cluster, model.tokenizer, model.sharded.config.vocab_size))
        head = Head(scheduler, cluster, server.say_once, tell or (lambda kind, value: None))
        StepLoop(part, head, options.job.patience, stack).run()
