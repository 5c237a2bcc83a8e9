"""One rank's whole life: load, take steps, and, on the head rank, answer over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hostring import Comm
from hostring.integrations.llm.request import HEAD_RANK
from hostring.integrations.llm.serve.head import Cluster, Head, Tell
from hostring.integrations.llm.serve.http.server import HttpServer
from hostring.integrations.llm.serve.http.service import Service
from hostring.integrations.llm.serve.loop import Follower, StepLoop
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.rank_part import RankPart
from hostring.integrations.llm.serve.scheduler import Scheduler
from hostring.integrations.llm.serve.supply import Supply


@dataclass(frozen=True)
class Serving:
    """A server that can answer. `scheduler.end()` ends it on all ranks."""

    url: str
    scheduler: Scheduler
    cluster: Cluster


def announce(serving: Serving) -> None:
    """Tell whoever started this where it listens. The line is for programs too."""
    print(f"listening on {serving.url}", flush=True)


def serve_rank(
    options: ServeOptions,
    comm: Comm,
    device: str,
    *,
    ready: Callable[[Serving], None] = announce,
    tell: Tell | None = None,
    http_cores: Collection[int] | None = None,
    supply: Supply | None = None,
) -> None:
    """Serve as one rank, until the server is told to end. A collective: every rank calls it.

    Args:
        ready: called on the head rank, once it can answer.
        tell: told of losses, on the head rank.
        supply: where this rank's model comes from; its own path when not given.
        http_cores: where the head's HTTP thread may run; where this thread may when None.

    Raises:
        HostringError: a rank was lost and did not come back.
        OSError: the head can't listen.
        ValueError: the model can't be loaded.
    """
    with contextlib.ExitStack() as stack:
        if comm.rank != HEAD_RANK:
            StepLoop(RankPart(options, comm, device, supply), Follower(), options.job.patience, stack).run()
            return
        server = HttpServer(options.host, options.port, http_cores)  # takes the port before anything is loaded
        stack.callback(server.close)
        part = RankPart(options, comm, device, supply)
        model = part.model
        shard, max_seq = max(model.sharded.plan.vocab), model.sharded.max_seq
        scheduler = Scheduler(options, model.tokenizer, shard, max_seq, part.groups, model.speculator)
        cluster = Cluster(comm.world_size)
        stack.callback(scheduler.refuse_all, "the server is shutting down")
        server.start(Service(options, scheduler, cluster, model.tokenizer, model.sharded.config.vocab_size))
        serving = Serving(server.url, scheduler, cluster)
        head = Head(scheduler, cluster, lambda: ready(serving), tell or (lambda kind, value: None))
        StepLoop(part, head, options.job.patience, stack).run()
